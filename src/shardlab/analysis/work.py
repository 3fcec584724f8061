"""What each rank has to do in a step, from the config alone: its rows, its places of the model, its order of actions.

Everything that a plan counts is counted from this, and this comes from the same functions that training calls: the cut
into micro-batches, the stages, the schedule's orders, the parameter table. Without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.config.schema import Config, Precision
from shardlab.models.cost import stage_layers, stages_per_rank
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.parallel.axis import Axis
from shardlab.parallel.mesh import Mesh, mesh_of
from shardlab.parallel.microbatch import parts
from shardlab.parallel.orders import SPLIT, orders, placement, runnable
from shardlab.parallel.part import Part
from shardlab.parallel.schedule import Action, Orders
from shardlab.parallel.stages import stage_ranges
from shardlab.parallel.table import ParameterTable


@dataclass(frozen=True)
class StepCut:
    """A full step's global batch as it is cut.

    rows: of every micro-batch, padding included; seq: its positions; count: micro-batches of the whole step
    each: micro-batches of a data rank; padding: rows of the whole step that are ignored
    """

    rows: int
    seq: int
    count: int
    each: int
    padding: int

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch."""
        return self.rows * self.seq


@dataclass(frozen=True, eq=False)
class Work:
    """A step of a run.

    stages: the places of each stage, -1 (embedding) to n_layers (norm and head)
    stages_of: by rank of the pipeline, the stages that it holds
    schedule: that runs; the config's, or the one that takes its place at this number of micro-batches
    orders: by rank of the pipeline
    products: the matrices' products and their gradients are computed by weight_gradients.py
    """

    config: Config
    mesh: Mesh
    shape: Shape
    table: ParameterTable
    cut: StepCut
    stages: list[range]
    stages_of: list[list[int]]
    schedule: str
    orders: Orders
    products: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an element of parameters, gradients, the optimizer's state, and of what travels between stages."""
        return 8 if self.config.precision.name is Precision.fp64 else 4

    @property
    def product_itemsize(self) -> int:
        """Bytes of an element of what comes out of a product."""
        return 2 if self.config.precision.name in (Precision.bf16, Precision.fp16) else self.itemsize

    def part(self, pipeline: int, tensor: int = 0) -> Part:
        """What a rank holds of the model. pipeline, tensor: its numbers on these axes"""
        places = tuple(place for stage in self.stages_of[pipeline] for place in self.stages[stage])
        return Part(places, Axis("tensor", tensor, self.mesh.tensor), self.config.strategy.sequence_parallel)

    def actions(self, pipeline: int) -> list[Action]:
        """What a rank does in a step, in turn. pipeline: its number on that axis"""
        return self.orders[pipeline]

    def positions(self, seq: int) -> int:
        """How many positions of a sequence are held between the matrices, padding included."""
        return self.part(0).positions(seq).size


def work_of(config: Config, shape: Shape, rows: int | None = None, seq: int | None = None) -> Work:
    """A checked config's step.

    rows: of the global batch, by default the config's; seq: of its rows, by default the longest
    """
    strategy, mesh = config.strategy, mesh_of(config.strategy)
    table = parameter_table(shape, strategy.sequence_parallel)
    cut = cut_of(config, mesh, rows or config.trainer.global_batch, seq or shape.max_len)
    schedule = strategy.schedule.name if mesh.pipeline > 1 else "1f1b"
    held = stages_per_rank(config) if mesh.pipeline > 1 else 1
    runs = runnable(schedule, mesh.pipeline, held, cut.each)
    return Work(
        config,
        mesh,
        shape,
        table,
        cut,
        stage_ranges(stage_layers(config, shape, table)),
        placement(schedule, mesh.pipeline, held),
        runs,
        orders(runs, mesh.pipeline, held, cut.each),
        products=schedule in SPLIT or (mesh.shard > 1 and not config.runtime.compile),
    )


def cut_of(config: Config, mesh: Mesh, rows: int, seq: int) -> StepCut:
    """The cut of a step of so many rows and positions."""
    trainer = config.trainer
    pieces = parts(rows, trainer.micro_batch, trainer.micro_batches, mesh.data_ranks)
    width = max(map(len, pieces))
    return StepCut(width, seq, len(pieces), len(pieces) // mesh.data_ranks, len(pieces) * width - rows)
