"""`shardlab plan`: what each rank of a run would hold, send and wait for, from the config alone; nothing is started.

The config is composed and checked as `train` does it, so a plan that is printed is a run that would start. Only the
values of optimizer.kwargs are left to the run: torch alone can judge them, and takes seconds to import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlab.analysis.activations import activation_memory
from shardlab.analysis.memory import Memory, held_elements, model_memory, used
from shardlab.analysis.traffic import Traffic, traffic
from shardlab.analysis.work import Work, work_of
from shardlab.config.schema import Config, ShardLevel
from shardlab.data.corpora import row_length
from shardlab.data.prepared import Meta
from shardlab.errors import ShardlabError
from shardlab.models.shape import shape_of
from shardlab.parallel.mesh import name_of
from shardlab.parallel.schedule import bubble
from shardlab.parallel.table import Entry
from shardlab.parallel.units import units

GIB = 2**30


@dataclass(frozen=True)
class RankPlan:
    """What one rank would hold and send.

    stages: the places of each of its stages
    elements: of the parameters that it keeps: under ZeRO 3 its pieces, with their padding
    """

    rank: int
    stages: list[range]
    elements: int
    memory: Memory
    sent: Traffic

    @property
    def sent_bytes(self) -> int:
        """In a step, over all axes."""
        return sum(sum(kinds.values()) for kinds in self.sent.values())


@dataclass(frozen=True)
class HeldShape:
    """A parameter as ranks hold it. ranks: those that do; shape: the one held, which may be a slice of the whole"""

    entry: Entry
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A run before it is one.

    name: of its mesh; work: of a full step; ranks: all of them, in order
    idle: share of a step that a rank waits for others if all stages take equally long and nothing to send, 0..1
    notes: what was asked for and could not be taken
    """

    config: Config
    name: str
    meta: Meta
    work: Work
    ranks: list[RankPlan]
    idle: float
    notes: list[str]

    @property
    def worst(self) -> RankPlan:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)

    def room(self, rank: RankPlan) -> float | None:
        """Bytes that a rank leaves of plan.memory_gib, below 0 where it needs more; None where nobody asked."""
        gib = self.config.plan.memory_gib
        return None if gib is None else gib * GIB - rank.memory.total

    @property
    def shapes(self) -> list[HeldShape]:
        """All parameters with values of their own, in the table's order."""
        work, held = self.work, []
        parts = [work.part(pipeline) for pipeline in range(work.mesh.pipeline)]
        for entry in work.table.own:
            here = [number for number, part in enumerate(parts) if used(work, entry.name, part)]
            ranks = [r.rank for r in self.ranks if work.mesh.coordinate(r.rank)["pipeline"] in here]
            held.append(HeldShape(entry, parts[here[0]].shape(entry), tuple(ranks)))
        return held


def plan_of(config: Config, meta: Meta, notes: list[str] | None = None) -> Plan:
    """The plan of a checked config. meta: of its prepared dataset. Raises ShardlabError for a wrong plan.memory_gib."""
    gib = config.plan.memory_gib
    if gib is not None and not (gib > 0 and math.isfinite(gib)):
        raise ShardlabError(f"plan.memory_gib={gib}: it must be a number above 0")
    work = work_of(config, shape_of(config.model, meta.vocab_size, meta.n_classes, row_length(config.dataset)))
    by_place = {
        (pipeline, shard): _rank(work, pipeline, shard)
        for pipeline in range(work.mesh.pipeline)
        for shard in range(work.mesh.shard)
    }
    ranks = []
    for number in range(work.mesh.ranks):
        place = work.mesh.coordinate(number)
        ranks.append(RankPlan(number, *by_place[place["pipeline"], place["shard"]]))
    return Plan(config, name_of(config.strategy), meta, work, ranks, bubble(work.orders), notes or [])


def _rank(work: Work, pipeline: int, shard: int) -> tuple[list[range], int, Memory, Traffic]:
    """What ranks with these numbers on the pipeline's and the shard's axes have in common, which is everything."""
    part = work.part(pipeline)
    elements = held_elements(work, part)
    if work.mesh.shard > 1 and work.config.strategy.shard_level is ShardLevel.parameters:
        elements = sum(unit.owned for unit in units(work.table, part, work.mesh.shard))
    memory = model_memory(work, pipeline, shard).with_activations(activation_memory(work, pipeline))
    stages = [work.stages[stage] for stage in work.stages_of[pipeline]]
    return stages, elements, memory, traffic(work, pipeline, shard)
