"""The backward pass in two parts: what the stage before waits for, and later the gradients of the weights.

A product y = x W^T has two products in its backward: dx = dy W, which everything before it needs, and dW = dy^T x,
which nothing needs before the optimizer. Schedules without bubbles do the first at once (I) and the second (W) when
there is nothing else to do. Put off are the products with matrices, a third of all work; biases, norms and the
embedding cost little and are done with the first part.

Here the products are done by a Function of our own, for a second reason too: it saves the parameter itself for
backward, not a copy of its values. So under ZeRO 3 the values may leave meanwhile, and under autocast no bf16 copy of
every weight stays alive between forward and backward.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 (there B and W).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.parallel.loss import widened

_WIDE, _COLUMNS = 16384, 1024
"""A product with more outputs than the first, such as a head's, is made so many columns at a time on the CPU: MKL
blocks it badly as a whole. A layer's own are faster whole (both measured in benchmarks/step/README.md)."""


def columns(outputs: int, device: torch.device) -> int:
    """How many outputs of a product to compute at a time."""
    return _COLUMNS if outputs > _WIDE and device.type == "cpu" else outputs


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias. x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs]; returns [..., outputs]"""
    some = columns(len(weight), x.device)
    if some == len(weight):
        return F.linear(x, weight, bias)
    biases = [None] * -(-len(weight) // some) if bias is None else bias.split(some)
    return torch.cat([F.linear(x, *each) for each in zip(weight.split(some), biases, strict=True)], dim=-1)


@dataclass(frozen=True)
class _PutOff:
    """What a weight's gradient will be computed from."""

    weight: nn.Parameter
    x: Tensor
    gradient: Tensor


class WeightGradients:
    """The products of a rank's model, and those of their gradients that are put off.

    arrived: called with each weight whose gradient has been added, since no hook of autograd will
    """

    def __init__(self, arrived: Callable[[nn.Parameter], None]) -> None:
        self._arrived = arrived
        self._put_off: dict[Hashable, list[_PutOff]] = defaultdict(list)
        self._key: Hashable | None = None

    def product(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """As the function above; x must require a gradient. weight, bias: with any number of dims for the outputs."""
        return cast(Tensor, _Product.apply(x, bias, (weight,), self))  # type: ignore[no-untyped-call]

    @contextmanager
    def putting_off(self, key: Hashable) -> Iterator[None]:
        """Backward passes within leave the gradients of weights to `compute(key)`."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def compute(self, key: Hashable) -> None:
        """Add the gradients that were put off under a key to their weights'."""
        for each in self._put_off.pop(key, []):
            self._add(each)

    def add(self, weight: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        """Add to a weight's gradient that of a product, now or when `compute` is called. gradient: of what it gave"""
        one = _PutOff(weight, x, gradient)
        if self._key is None:
            self._add(one)
        else:
            self._put_off[self._key].append(one)

    @torch.no_grad()
    def _add(self, one: _PutOff) -> None:
        gradient = weight_gradient(one.gradient, one.x, one.weight)
        if one.weight.grad is None:
            one.weight.grad = gradient
        else:
            one.weight.grad += gradient
        self._arrived(one.weight)


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dW, in the weight's shape and dtype. gradient: [..., outputs]; x: [..., inputs]"""
    dy, flat = gradient.flatten(0, -2), x.flatten(0, -2)
    some = columns(dy.shape[1], x.device)
    parts = [part.t() @ flat for part in dy.split(some, dim=1)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.to(weight.dtype).view_as(weight)


class _Product(torch.autograd.Function):
    """The weight comes in a tuple, which autograd doesn't look into: its gradient is added by hand, and where autograd
    knew of it, its hooks would fire all the same."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: nn.Parameter | None, hidden: tuple[nn.Parameter], owner: WeightGradients
    ) -> Tensor:
        (weight,) = hidden
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x)
        ctx.bias, ctx.weight, ctx.owner = bias, weight, owner
        matrix = weight.detach().reshape(-1, x.shape[-1]).to(x.dtype)
        return product(x, matrix, None if bias is None else bias.flatten().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,), dy, weight, bias = ctx.saved_tensors, grads[0], ctx.weight, ctx.bias
        some = columns(dy.shape[-1], dy.device)
        matrix = weight.detach().reshape(-1, x.shape[-1]).to(dy.dtype)
        dx, *others = (a @ b for a, b in zip(dy.split(some, dim=-1), matrix.split(some), strict=True))
        if others:
            dx = widened(dx)
        for other in others:
            dx += other
        ctx.owner.add(weight, x, dy)
        return dx, None if bias is None else dy.flatten(0, -2).sum(0).to(bias.dtype).view_as(bias), None, None
