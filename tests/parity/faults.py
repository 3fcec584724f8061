"""Deliberate faults, planted in the ranks of a run: each must make parity fail, or parity proves nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

import shardlab.models.transformer as transformer
import shardlab.parallel.replicate as replicate
import shardlab.training.build as build
from shardlab.config.schema import Config
from shardlab.parallel.dropout import Masks
from shardlab.parallel.mesh import Mesh, connect
from shardlab.parallel.microbatch import take
from shardlab.parallel.replicate import GradientSum
from shardlab.training.device import meet
from shardlab.training.loop import train_rank
from shardlab.training.place import Place


def skip_all_reduce() -> None:
    """Each rank trains on its own gradients; the loss is still summed."""
    sent = SimpleNamespace(wait=lambda: None)
    replicate.dist = SimpleNamespace(ReduceOp=replicate.dist.ReduceOp, all_reduce=lambda *_, **__: sent)  # type: ignore[assignment]


def mean_instead_of_sum() -> None:
    """What DistributedDataParallel would do."""
    summed = GradientSum.finish

    def finish(self: GradientSum) -> None:
        summed(self)
        for flat in self._buckets:
            flat.div_(torch.distributed.get_world_size())

    GradientSum.finish = finish  # type: ignore[method-assign]


def count_padding_as_targets() -> None:
    """A micro-batch's padding rows keep their targets."""

    def careless(number, part, width, inputs, targets, lengths):
        taken = take(number, part, width, inputs, targets, lengths)
        taken.targets.copy_(targets[taken.rows])
        return taken

    build.take = careless


def mean_of_micro_batch_means() -> None:
    """Each micro-batch weighs the same, however many targets it has."""
    summed = transformer.summed_cross_entropy

    def mean(logits, targets):
        valid = (targets != -100).sum().clamp(min=1)
        return summed(logits, targets) / valid * 100

    transformer.summed_cross_entropy = mean


def reuse_a_mask() -> None:
    """Every micro-batch is dropped with the masks of the first rows."""
    drop = Masks.drop

    def reused(self: Masks, x: torch.Tensor, site: int, dim: int = 1, first: int = 0) -> torch.Tensor:
        return drop(Masks(self.keys, torch.arange(len(self.rows)), self.p), x, site, dim, first)

    Masks.drop = reused  # type: ignore[method-assign]


FAULTS = {
    fault.__name__: fault
    for fault in (
        skip_all_reduce,
        mean_instead_of_sum,
        count_padding_as_targets,
        mean_of_micro_batch_means,
        reuse_a_mask,
    )
}


def train_with_fault(place: Place, fault: str, config: Config, run_dir: Path, data_dir: Path) -> None:
    """train_rank in a rank whose code has been broken. Fresh ranks forget it."""
    FAULTS[fault]()
    train_rank(place, config, run_dir, data_dir)


def timeouts(place: Place, seconds: float) -> float:
    """What a collective of the replicate axis waits, in a rank of a mesh made with that timeout."""
    meet(place, torch.device("cpu"), 100.0)
    group = connect(Mesh(replicate=place.ranks), place.rank, "cpu", seconds).groups["replicate"]
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
