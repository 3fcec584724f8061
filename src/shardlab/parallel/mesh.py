"""The mesh: how many ranks stand along each of the four axes, and which ranks share a line.

Every strategy is a point in this space. Code asks the mesh, never a strategy's name; the names that tables and
run names show are derived from it here. The sizes need no torch, so that the command line can reason about
them; `connect` makes the process groups once the ranks exist.

Ranks are numbered with tensor innermost and pipeline outermost: the axis that talks most gets the nearest ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from shardlab.config.schema import AXES, Reduce, Schedule, ShardLevel, StrategyConfig
from shardlab.parallel.axis import Axis

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

DATA_AXES = ("replicate", "shard")
"""The axes along which ranks train different rows of a step."""

LOSS_AXES = ("pipeline", *DATA_AXES)
"""The axes over which a step's loss is added up: different rows, and stages of which the last alone has a loss. The
ranks of the tensor axis all have the same one."""


@dataclass(frozen=True)
class Mesh:
    """The size of each axis.

    pipeline: stages, each a consecutive piece of the layers
    replicate: copies that each train a share of the step's rows
    shard: as replicate, with parameters, gradients or optimizer state cut between the copies (ZeRO)
    tensor: parts that each matrix is cut into
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return int(getattr(self, axis))

    @property
    def ranks(self) -> int:
        """Number of ranks in the whole mesh."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Number of shares that a step's rows are dealt into."""
        return self.replicate * self.shard

    @property
    def name(self) -> str:
        """For run names and tables: 'single', 'ddp2', 'pipeline2-ddp2'."""
        words = {"replicate": "ddp"}
        parts = [f"{words.get(axis, axis)}{self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return "-".join(parts) or "single"

    def coordinate(self, rank: int) -> dict[str, int]:
        """A rank's place along each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.size(axis))
        return place

    def data_rank(self, rank: int) -> int:
        """Which share of a step's rows a rank trains: 0..data_ranks-1."""
        place = self.coordinate(rank)
        return place["replicate"] * self.shard + place["shard"]


def mesh_of(strategy: StrategyConfig) -> Mesh:
    """The point in the space of meshes that a config names."""
    return Mesh(**{axis: getattr(strategy, axis) for axis in AXES})


ZERO = {ShardLevel.optimizer: 1, ShardLevel.gradients: 2, ShardLevel.parameters: 3}
"""The level's number in the ZeRO paper (Rajbhandari et al. 2020)."""


def name_of(strategy: StrategyConfig) -> str:
    """The mesh's name, with the level of a sharding, and a pipeline's schedule where it isn't the usual one.

    'pipeline2', 'pipeline2-zbv', 'zero3x2', 'zero1x2-tensor2'
    """
    mesh = mesh_of(strategy)
    name = mesh.name.replace("shard", f"zero{ZERO[strategy.shard_level]}x")
    usual = mesh.pipeline == 1 or strategy.schedule is Schedule["1f1b"]
    return name if usual else f"{name}-{strategy.schedule.name}"


@dataclass(frozen=True)
class Connected:
    """A rank's view of the mesh once the ranks are connected. axes: by name, each as this rank sees it"""

    mesh: Mesh
    rank: int
    axes: dict[str, Axis]

    @property
    def data_rank(self) -> int:
        """Which share of a step's rows this rank trains."""
        return self.mesh.data_rank(self.rank)

    @property
    def place(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return self.mesh.coordinate(self.rank)

    def sum(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Sum x in place over the ranks along some axes; returns it."""
        for axis in axes:
            self.axes[axis].all_reduce(x)
        return x

    def agree(self, x: Tensor) -> Tensor:
        """Give x the value that it has on rank 0, in place: what ranks decide by must not differ by a bit."""
        import torch.distributed as dist

        if self.mesh.ranks > 1:
            dist.broadcast(x, src=0)
        return x

    def wait(self) -> None:
        """Go on when all ranks have come here."""
        import torch.distributed as dist

        if self.mesh.ranks > 1:
            dist.barrier()


def connect(mesh: Mesh, rank: int, device_type: str, timeout: float, reduce: Reduce = Reduce.backend) -> Connected:
    """Make the process groups of every axis. Needs an initialised default process group if mesh.ranks > 1.

    timeout: seconds that a collective may wait
    reduce: who sums large tensors over the data axes
    """
    groups: dict[str, ProcessGroup | None] = dict.fromkeys(AXES)
    if mesh.ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import _set_pg_timeout

        device_mesh = init_device_mesh(device_type, tuple(mesh.size(axis) for axis in AXES), mesh_dim_names=AXES)
        for axis in AXES:
            if mesh.size(axis) > 1:
                # A mesh's groups take torch's own default, half an hour, and no public call changes it.
                _set_pg_timeout(timedelta(seconds=timeout), device_mesh.get_group(axis))
                groups[axis] = device_mesh.get_group(axis)
    place = mesh.coordinate(rank)
    ring = {axis: reduce is Reduce.ring and axis in DATA_AXES for axis in AXES}
    axes = {axis: Axis(axis, place[axis], mesh.size(axis), groups[axis], ring[axis]) for axis in AXES}
    return Connected(mesh, rank, axes)
