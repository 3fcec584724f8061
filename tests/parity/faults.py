"""Deliberate faults, planted in the ranks of a run: each must make parity fail, or parity proves nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from pipeline_faults import PIPELINE_FAULTS
from zero_faults import RING_FAULTS, ZERO_FAULTS

import shardlab.models.transformer as transformer
import shardlab.parallel.clipping as clipping
import shardlab.parallel.tensor as tensor
import shardlab.parallel.values as values
import shardlab.training.build as build
import shardlab.training.step as step
from shardlab.config.schema import Config
from shardlab.parallel.axis import Axis, Done
from shardlab.parallel.dropout import Masks
from shardlab.parallel.mesh import Connected, Mesh, connect
from shardlab.parallel.microbatch import take
from shardlab.parallel.replicate import GradientSum
from shardlab.training.device import meet
from shardlab.training.loop import train_rank
from shardlab.training.place import Place


def skip_all_reduce() -> None:
    """Each rank trains on its own gradients; the loss is still summed."""
    Axis.start_sum = lambda self, x: Done()  # type: ignore[method-assign]


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


def skip_f() -> None:
    """What goes into split matrices gets its gradient from this rank's columns alone."""
    tensor._Enter.backward = staticmethod(lambda ctx, grad: (grad, None))  # type: ignore[method-assign]


def bias_on_every_rank() -> None:
    """A row-split product adds its bias before the sum over ranks."""

    def careless(self, x):
        return tensor.leave(F.linear(x, self.weight.reshape(-1, x.shape[-1]), self.bias), self.axis)

    transformer.RowLinear.forward = careless  # type: ignore[method-assign]


def fan_of_the_shard() -> None:
    """Matrices that are split by their inputs are drawn with the bound of what is left of them."""
    draw = values.initial_value

    def careless(entry, seed, part):
        if entry.name.endswith(("out.weight", "down.weight")):
            entry = replace(entry, law=values.Uniform(entry.law.bound * part.axis.ranks**0.5))
        return draw(entry, seed, part)

    values.initial_value = careless


def masks_of_the_first_slice() -> None:
    """Every rank drops its heads and features with the masks of the first rank's."""
    drop = Masks.drop
    Masks.drop = lambda self, x, site, dim=1, first=0: drop(self, x, site)  # type: ignore[method-assign]


def count_padded_words() -> None:
    """The softmax takes the padding of the vocabulary for words."""
    span = transformer.span

    def careless(whole, axis):
        return replace(span(whole, axis), valid=span(whole, axis).size)

    transformer.span = careless


def count_replicated_twice() -> None:
    """Each tensor rank adds what all of them hold to the norm."""
    step.global_norm = lambda trained, table, part, mesh: clipping.global_norm(trained, table, part, _First(mesh))


class _First:
    """A mesh where every rank takes itself for the first of the tensor axis."""

    def __init__(self, mesh: Connected) -> None:
        self.sum, self.place = mesh.sum, mesh.place | {"tensor": 0}


DATA_FAULTS = (
    skip_all_reduce,
    mean_instead_of_sum,
    count_padding_as_targets,
    mean_of_micro_batch_means,
    reuse_a_mask,
)
TENSOR_FAULTS = (
    skip_f,
    bias_on_every_rank,
    fan_of_the_shard,
    masks_of_the_first_slice,
    count_padded_words,
    count_replicated_twice,
)
FAULTS = {
    fault.__name__: fault for fault in (*DATA_FAULTS, *TENSOR_FAULTS, *PIPELINE_FAULTS, *ZERO_FAULTS, *RING_FAULTS)
}


def train_with_fault(place: Place, fault: str, config: Config, run_dir: Path, data_dir: Path) -> None:
    """train_rank in a rank whose code has been broken. Fresh ranks forget it."""
    FAULTS[fault]()
    train_rank(place, config, run_dir, data_dir)


def timeouts(place: Place, seconds: float) -> float:
    """What a collective of the replicate axis waits, in a rank of a mesh made with that timeout."""
    meet(place, torch.device("cpu"), 100.0)
    group = connect(Mesh(replicate=place.ranks), place.rank, "cpu", seconds).axes["replicate"].group
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
