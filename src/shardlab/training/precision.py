"""In what numbers a rank computes."""

from __future__ import annotations

import torch

from shardlab.config.schema import Precision

PARAMETERS = {
    Precision.fp32: torch.float32,
    Precision.fp64: torch.float64,
    Precision.bf16: torch.float32,
    Precision.fp16: torch.float32,
    Precision.tf32: torch.float32,
}
"""The dtype of parameters, gradients and the optimizer's state, and of what travels between stages."""
