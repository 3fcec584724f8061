"""What of a rank's memory is parameters, gradients and optimizer state, at the moment when they are most together.

That moment lies within a backward pass: the gradient that arrives has memory of its own until it is added to the ones
before. Under ZeRO, gathered units and gradients on their way to their owners come on top (zero.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardlab.analysis.work import Work
from shardlab.analysis.zero import walk
from shardlab.config.optimizers import state_elements
from shardlab.parallel.part import Part
from shardlab.parallel.units import units


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    parameters, gradients: when both together are most; optimizer: its state, from the first update on
    activations: what forwards leave for backwards, at most, and the largest that is made on the way
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def model(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    def with_activations(self, activations: int) -> Memory:
        """The same with activations."""
        return replace(self, activations=activations)

    @property
    def total(self) -> int:
        """All kinds: as if each were most at the same time."""
        return self.model + self.activations


def model_memory(work: Work, pipeline: int, shard: int) -> Memory:
    """Without activations. pipeline, shard: the rank's numbers on these axes"""
    part = work.part(pipeline)
    if work.mesh.shard > 1:
        walked = walk(work, pipeline)
        parameters, gradients = walked.parameters, walked.gradients
    else:
        parameters = held_elements(work, part)
        gradients = parameters + arriving_elements(work, part)
    state = sum(state_elements(work.config.optimizer, shape) for shape in trained_shapes(work, part, shard))
    return Memory(parameters * work.itemsize, gradients * work.itemsize, state * work.itemsize)


def held_elements(work: Work, part: Part) -> int:
    """Elements of what a part holds, padding of the tensor axis included; a tied weight once."""
    return sum(math.prod(part.shape(entry)) for entry in work.table.own if used(work, entry.name, part))


def used(work: Work, owner: str, part: Part) -> bool:
    """Whether a part holds an entry that has values of its own, for its own place or that of one that is tied to it."""
    return any(entry.layer in part.layers for entry in work.table if owner in (entry.name, entry.tied_to))


def arriving_elements(work: Work, part: Part) -> int:
    """The largest gradient that is added to one that is there: none if this is the only one of a step.

    Where a rank has both uses of a tied weight in one stage, autograd keeps the head's until the embedding's is there.
    """
    sizes = [math.prod(part.shape(entry)) for entry in work.table.own if used(work, entry.name, part)]
    in_buckets = work.mesh.replicate > 1
    several = work.cut.each > 1 or in_buckets
    tied = [entry for entry in work.table if entry.tied_to and len(work.stages) == 1]
    kept = sum(math.prod(part.shape(work.table[entry.tied_to or ""])) for entry in tied)
    return (max(sizes) if several or kept else 0) + (kept if several else 0)


def trained_shapes(work: Work, part: Part, shard: int) -> list[tuple[int, ...]]:
    """Shapes of what a rank's optimizer trains: its parameters, or pieces of them. shard: its number on that axis"""
    if work.mesh.shard == 1:
        return [part.shape(entry) for entry in work.table.own if used(work, entry.name, part)]
    pieces = (unit.pieces(part, shard) for unit in units(work.table, part, work.mesh.shard))
    return [(stop - first,) for each in pieces for _, first, stop in each]
