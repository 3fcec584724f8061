"""The tensor axis: each matrix split over the ranks, by plain collectives as in the Megatron paper.

A block needs two pairs of them. `enter` (the paper's f) stands where a replicated activation goes into split
matrices: identity forward, and backward the sum of what each rank's columns send back. `leave` (g) stands where the
row-split products come out: their sum forward, identity backward. Between the two every rank works on its own heads
or features alone. The embedding is split by vocabulary (a row that another rank holds counts as zero, and `leave`
adds them up), and so are the head and its cross-entropy, which never gathers the logits.

Source: Shoeybi et al. 2019, section 3. The collectives stand in Functions of their own, without a weight: schedules
that split the backward pass call the backward of a Function that takes a weight twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardlab.parallel.axis import Axis
from shardlab.parallel.loss import widened

# torch gives Function.apply no types: hence the casts and the ignored calls below.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def enter(x: Tensor, axis: Axis) -> Tensor:
    """f: x itself; its gradient is summed over the axis."""
    return x if axis.group is None else cast(Tensor, _Enter.apply(x, axis))  # type: ignore[no-untyped-call]


def leave(x: Tensor, axis: Axis) -> Tensor:
    """g: the sum of all ranks' x, in place; its gradient goes back as it is."""
    return x if axis.group is None else cast(Tensor, _Leave.apply(x, axis))  # type: ignore[no-untyped-call]


def own_indices(indices: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices into a slice of `size` rows that begins at row `first`, and which of them lie outside of it (as 0).

    indices: int64 [...]; returns int64 [...] and bool [...]
    """
    own = indices - first
    outside = (own < 0) | (own >= size)
    return own.masked_fill_(outside, 0), outside


def vocabulary_embedding(
    indices: Tensor, weight: Tensor, first: int, axis: Axis, leave: Callable[[Tensor, Axis], Tensor] = leave
) -> Tensor:
    """Rows of a weight that is split by rows: [..., d_model], the same on every rank.

    indices: int64 [...]; weight: [rows held, d_model], from row `first` of the whole
    leave: adds up what the ranks found
    """
    own, outside = own_indices(indices, first, len(weight))
    return leave(F.embedding(own, weight).masked_fill(outside.unsqueeze(-1), 0.0), axis)


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, valid: int, axis: Axis) -> Tensor:
        own, outside = own_indices(targets, first, valid)
        largest = logits.new_full((len(logits),), -torch.inf)
        if valid > 0:
            torch.amax(logits[:, :valid], -1, out=largest)
        axis.all_reduce(largest, dist.ReduceOp.MAX)
        exps = (logits - largest.unsqueeze(1)).exp_()
        exps[:, valid:] = 0.0  # padding of the vocabulary is no word: it has no share in the softmax
        picked = (logits.gather(1, own.unsqueeze(1)).squeeze(1) - largest).masked_fill_(outside, 0.0)
        sums, picked = axis.all_reduce(torch.stack([exps.sum(-1), picked]))
        ignored = targets < 0
        ctx.save_for_backward(exps, sums, own, outside, ignored)
        loss: Tensor = (sums.log() - picked).masked_fill_(ignored, 0.0).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        exps, sums, own, outside, ignored = ctx.saved_tensors
        weight = grads[0].expand_as(sums).masked_fill(ignored, 0.0)
        gradient = exps.mul_((weight / sums).unsqueeze(1))  # in place: the largest tensor of the model
        gradient.scatter_add_(1, own.unsqueeze(1), -weight.masked_fill(outside, 0.0).unsqueeze(1))
        return gradient, None, None, None, None


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, first: int, valid: int, axis: Axis) -> Tensor:
    """Cross-entropy in nats over logits that are split by vocabulary, summed over the targets: a scalar on every rank.

    logits: [n, columns held], of words from `first` on; columns from `valid` on are padding
    targets: int64 [n]; negative ones (IGNORE) weigh nothing

    What travels is three numbers a target: the largest logit, the sum of exponentials and the target's own logit.
    """
    loss = _VocabularyCrossEntropy.apply(widened(logits), targets, first, valid, axis)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)
