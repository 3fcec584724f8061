"""Bytes that a rank sends in a training step, by axis and kind, counted as axis.py counts them at the calls.

Exact: tests/parity/test_planned.py compares them with what the ranks of real steps have counted.
"""

from __future__ import annotations

import math
from collections import Counter

from shardlab.analysis.memory import used
from shardlab.analysis.work import Work
from shardlab.analysis.zero import walk
from shardlab.config.schema import AXES, Checkpoint, Norm, ShardLevel
from shardlab.parallel.axis import all_reduce_bytes, part_bytes
from shardlab.parallel.buckets import buckets
from shardlab.parallel.mesh import LOSS_AXES
from shardlab.parallel.part import Part
from shardlab.parallel.schedule import Action, Kind
from shardlab.parallel.units import units

Traffic = dict[str, Counter[str]]
"""By axis: bytes by kind of collective (all_reduce, reduce_scatter, all_gather, send)."""

FP64 = 8
"""Bytes of an element of the loss and of the squares of the gradient norm."""


def traffic(work: Work, pipeline: int, shard: int) -> Traffic:
    """What a rank sends in a step. pipeline, shard: its numbers on these axes"""
    sent: Traffic = {axis: Counter() for axis in AXES}
    part = work.part(pipeline)
    if work.mesh.pipeline > 1:
        _stages(work, pipeline, sent["pipeline"])
    if work.mesh.tensor > 1:
        for action in work.actions(pipeline):
            _crossings(work, action, sent["tensor"])
        _sum_slices(work, part, shard, sent["tensor"])
    if work.mesh.shard > 1:
        _zero(work, pipeline, sent)
    elif work.mesh.replicate > 1:
        _buckets(work, part, sent["replicate"])
    if work.mesh.pipeline > 1:
        _tied(work, part, shard, sent["pipeline"])
    for axis, elements in [*((axis, 1) for axis in LOSS_AXES), *((axis, len(work.table.own)) for axis in _NORM_AXES)]:
        _all_reduce(sent[axis], elements, FP64, work.mesh.size(axis))
    return {axis: +kinds for axis, kinds in sent.items() if +kinds}


_NORM_AXES = ("pipeline", "shard", "tensor")


def _all_reduce(sent: Counter[str], elements: int, itemsize: int, ranks: int) -> None:
    sent["all_reduce"] += all_reduce_bytes(elements, itemsize, ranks)


def _stages(work: Work, pipeline: int, sent: Counter[str]) -> None:
    """Activations to the stage after, their gradients to the stage before, where another rank has it."""
    holder = {stage: rank for rank, stages in enumerate(work.stages_of) for stage in stages}
    size = work.cut.rows * work.positions(work.cut.seq) * work.shape.d_model * work.itemsize
    for stage in work.stages_of[pipeline]:
        neighbours = [other for other in (stage - 1, stage + 1) if holder.get(other, pipeline) != pipeline]
        sent["send"] += len(neighbours) * work.cut.each * size


def _crossings(work: Work, action: Action, sent: Counter[str]) -> None:
    """What the matrices of a stage's places sum over the tensor axis in one pass of a micro-batch."""
    if action.kind is Kind.W:
        return
    forward, ranks = action.kind is Kind.F, work.mesh.tensor
    again = checkpoints(work, action.micro_batch)
    sliced = work.config.strategy.sequence_parallel
    elements = work.cut.rows * work.positions(work.cut.seq) * (ranks if sliced else 1) * work.shape.d_model

    def enter(forwards: int, itemsize: int) -> None:
        if sliced:
            sent["all_gather"] += forwards * part_bytes(elements, itemsize, ranks)
            sent["reduce_scatter"] += 0 if forward else part_bytes(elements, itemsize, ranks)
        elif not forward:
            _all_reduce(sent, elements, itemsize, ranks)

    def leave(forwards: int, itemsize: int) -> None:
        if sliced:
            sent["reduce_scatter"] += forwards * part_bytes(elements, itemsize, ranks)
            sent["all_gather"] += 0 if forward else part_bytes(elements, itemsize, ranks)
        else:
            sent["all_reduce"] += forwards * all_reduce_bytes(elements, itemsize, ranks)

    for place in work.stages[action.stage]:
        if place == -1:
            leave(int(forward), work.itemsize)
        elif place < work.shape.n_layers:
            enter(forward or again, work.itemsize)
            leave(forward or again, work.product_itemsize)
            enter(forward or again, work.itemsize)
            # Computed again, a layer ends with the last thing that it keeps: the sum may come after that.
            needs_end = work.shape.norm is Norm.post or work.shape.dropout > 0
            leave(forward or (again and needs_end), work.product_itemsize)
        elif work.shape.causal:
            enter(int(forward), work.itemsize)
            if forward:  # the loss: the largest logit of each target, then two sums
                _all_reduce(sent, work.cut.tokens, work.itemsize, ranks)
                _all_reduce(sent, 2 * work.cut.tokens, work.itemsize, ranks)
        elif sliced and forward:
            _all_reduce(sent, work.cut.rows * work.shape.d_model, work.itemsize, ranks)  # the first tokens


def checkpoints(work: Work, micro_batch: int) -> bool:
    """Whether a micro-batch's activations are computed again in its backward. micro_batch: its number on this rank"""
    match work.config.strategy.activation_checkpoint:
        case Checkpoint.never:
            return False
        case Checkpoint.always:
            return True
        case Checkpoint.except_last:
            return micro_batch < work.cut.each - 1


def _sum_slices(work: Work, part: Part, shard: int, sent: Counter[str]) -> None:
    """Gradients of what sequence parallelism uses on slices, as one tensor."""
    elements = sum(_trained(work, part, shard, [e.name for e in work.table.own if "tensor" in e.summed_over]))
    _all_reduce(sent, elements, work.itemsize, work.mesh.tensor)


def _tied(work: Work, part: Part, shard: int, sent: Counter[str]) -> None:
    """Gradients of a tied weight to the pipeline's other end."""
    for entry in work.table:
        if entry.tied_to is not None:
            ends = {entry.layer in part.layers, work.table[entry.tied_to].layer in part.layers}
            if ends == {True, False}:
                sent["send"] += sum(_trained(work, part, shard, [entry.tied_to])) * work.itemsize


def _trained(work: Work, part: Part, shard: int, names: list[str]) -> list[int]:
    """Elements of what a rank trains of some parameters."""
    if work.mesh.shard == 1:
        return [math.prod(part.shape(work.table[name])) for name in names if used(work, name, part)]
    pieces = (unit.pieces(part, shard) for unit in units(work.table, part, work.mesh.shard))
    return [stop - first for each in pieces for entry, first, stop in each if entry.name in names]


def _buckets(work: Work, part: Part, sent: Counter[str]) -> None:
    """Gradients of copies."""
    own = [entry for entry in work.table.own if used(work, entry.name, part)]
    sizes = [math.prod(part.shape(entry)) for entry in reversed(own)]
    for bucket in buckets([(size, work.itemsize) for size in sizes]):
        _all_reduce(sent, sum(sizes[number] for number in bucket), work.itemsize, work.mesh.replicate)


def _zero(work: Work, pipeline: int, sent: Traffic) -> None:
    """Units to their owners, and back."""
    walked, ranks = walk(work, pipeline), work.mesh.shard
    updated = work.config.strategy.shard_level is not ShardLevel.parameters
    for number, unit in enumerate(walked.units):
        size = part_bytes(unit.size, work.itemsize, ranks)
        sent["shard"]["reduce_scatter"] += walked.reduced[number] * size
        sent["shard"]["all_gather"] += (walked.gathered[number] + updated) * size
        _all_reduce(sent["replicate"], unit.owned, work.itemsize, work.mesh.replicate)
