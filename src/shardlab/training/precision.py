"""In what numbers a rank computes.

Parameters, gradients, the optimizer's state, the residual stream and what travels between stages are in the
parameters' dtype (PARAMETERS) always. Under bf16 and fp16 the products take rounded copies of their factors, by
autocast, in each place of the model and nowhere else. What sums many small terms (softmax, cross-entropy) asks for
fp32 by itself (`parallel/loss.py:widened`), for autocast's lists differ between CPU and CUDA; norms read the residual
stream, which is in fp32.

fp16 has too few small numbers for gradients: the loss's gradient, which everything before it is multiplied by,
starts at a scale instead of 1. It is a power of two, so to take it out again rounds nothing. A step whose gradients
overflow at that scale is skipped and the scale halved; after many good ones it is doubled.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3; the constants are torch.amp.GradScaler's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from shardlab.config.schema import Precision
from shardlab.errors import ShardlabError
from shardlab.parallel.replicate import Members

PARAMETERS = {
    Precision.fp32: torch.float32,
    Precision.fp64: torch.float64,
    Precision.bf16: torch.float32,
    Precision.fp16: torch.float32,
    Precision.tf32: torch.float32,
}
"""The dtype of parameters, gradients and the optimizer's state, and of what travels between stages."""

PRODUCTS = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
"""The dtype of products, where it is another."""

FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
"""torch.amp.GradScaler's: the scale of the first step, its factors, and after how many good steps in a row it grows."""

SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**126
"""Below 1 the gradients themselves are too large for fp16; beyond 2^126 the inverse is no normal fp32 number."""

_TF32_CAPABILITY = (8, 0)
"""Of the first NVIDIA GPUs whose products can be TF32."""


@dataclass
class LossScale:
    """The scale of fp16's loss; both values are the state that a checkpoint must keep.

    value: of the next step; good: steps in a row without an overflow, since it last changed
    """

    value: float = FIRST_SCALE
    good: int = 0

    def grow(self) -> None:
        """After a step whose gradients were finite: double it if there were enough of them."""
        self.good += 1
        if self.good == GROWTH_INTERVAL:
            self.value, self.good = min(self.value * GROWTH, LARGEST_SCALE), 0

    def back_off(self) -> None:
        """After a step whose gradients overflowed: halve it."""
        self.value, self.good = self.value * BACKOFF, 0


def loss_scale(precision: Precision) -> LossScale | None:
    """The scale at the start of a run; None where the loss isn't scaled."""
    return LossScale() if precision is Precision.fp16 else None


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Within it, products are computed as the precision says."""
    if precision not in PRODUCTS:
        return nullcontext()
    return torch.autocast(device.type, PRODUCTS[precision])


def set_products(precision: Precision, device: torch.device) -> None:
    """Let this process's fp32 products round their factors to TF32, if the precision says so.

    Raises ShardlabError for a GPU that can't.
    """
    if precision is not Precision.tf32:
        return
    if torch.cuda.get_device_capability(device) < _TF32_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ShardlabError(f"precision=tf32: {name} has no TF32 products; precision=fp32 or fp16 would run")
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def unscale(trained: Members, scale: LossScale) -> None:
    """Take the loss's scale out of the gradients. trained: their parameters; the gradients must be complete."""
    gradients = [parameter.grad for _, parameter in trained if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, 1 / scale.value)
