"""Sequence parallel: between the split matrices of the tensor axis, each rank holds a slice of every sequence.

Under tensor parallelism alone, norms, dropout and residual sums are done on whole sequences, the same on every rank.
None of them looks at two positions at once, so each rank can do its own positions and keep no more. Then an activation
is gathered along the sequence where it enters split matrices, and where the ranks' summands leave them, their sum is
scattered: what was one all-reduce is a reduce-scatter and an all-gather, the same bytes. (The paper keeps the slice
and gathers again for a weight's gradient; here the gathered activation is kept.)

A sequence that doesn't divide is padded to a multiple of the ranks. Padding is hidden as a key, and no target looks at
it, so that it weighs nothing.

Weights that are used on slices, norms and biases, are the same on every rank, but each rank has the gradient of its
positions alone: the table says so, and `sum_slices` adds them up.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.parallel.axis import Axis
from shardlab.parallel.part import Part
from shardlab.parallel.replicate import Members
from shardlab.parallel.tensor import enter, leave

Crossing = Callable[[Tensor, Axis], Tensor]

# torch gives Function.apply no types: hence the casts and the ignored calls below.


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    """All ranks' slices one behind the other along the sequence: [rows, ranks * n, d] of [rows, n, d]."""
    slices = x.new_empty((axis.ranks, *x.shape))
    axis.start_all_gather(slices.view(-1), x.contiguous().view(-1)).wait()
    return slices.transpose(0, 1).flatten(1, 2)


def _scattered(x: Tensor, axis: Axis) -> Tensor:
    """This rank's slice of the sum of all ranks' x: [rows, n, d] of [rows, ranks * n, d]."""
    slices = x.unflatten(1, (axis.ranks, -1)).transpose(0, 1).contiguous()
    own = x.new_empty(slices.shape[1:])
    axis.start_reduce_scatter(own.view(-1), slices.view(-1)).wait()
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.axis), None


def gather(x: Tensor, axis: Axis) -> Tensor:
    """The paper's g: whole sequences of the ranks' slices; the gradient's sum is scattered. x: [rows, n, d_model]"""
    return x if axis.group is None else cast(Tensor, _Gather.apply(x, axis))  # type: ignore[no-untyped-call]


def scatter(x: Tensor, axis: Axis) -> Tensor:
    """Its conjugate: a slice of the sum of all ranks' x; the gradient is gathered. x: [rows, ranks * n, d_model]"""
    return x if axis.group is None else cast(Tensor, _Scatter.apply(x, axis))  # type: ignore[no-untyped-call]


def crossing(part: Part) -> tuple[Crossing, Crossing]:
    """What an activation goes through into split matrices, and out of them."""
    return (gather, scatter) if part.sequence_parallel else (enter, leave)


def first_tokens(x: Tensor, part: Part) -> Tensor:
    """The first token of each sequence, on every rank: [rows, d_model] of [rows, positions held, d_model].

    Every rank computes the same loss from it. So its gradient goes back to the slice that it is from as it is: a sum
    over the ranks would count it as often as there are ranks.
    """
    if not part.sequence_parallel:
        return x[:, 0]
    elsewhere = torch.tensor(part.axis.rank > 0, device=x.device)
    return leave(x[:, 0].masked_fill(elsewhere, 0.0), part.axis)


def sum_slices(trained: Members, axis: Axis) -> None:
    """Sum over the tensor axis the gradients that the table says are of this rank's positions alone, as one tensor.

    trained: what this rank updates, alike on all ranks of the axis; their gradients must be complete but for this
    """
    gradients = [parameter.grad for entry, parameter in trained if axis.name in entry.summed_over]
    own = [gradient for gradient in gradients if gradient is not None]
    if axis.group is None or not own:
        return
    summed = axis.all_reduce(torch.cat([gradient.flatten() for gradient in own]))
    for gradient, value in zip(own, summed.split([gradient.numel() for gradient in own]), strict=True):
        gradient.copy_(value.view_as(gradient))
