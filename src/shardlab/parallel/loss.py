"""The loss of a step: a sum over its targets, divided by how many there are in the whole global batch.

That number is known from the batch before the first forward, on every rank. A part of the batch therefore adds
its share by plain summation, over micro-batches and over ranks, whatever its size and however it is padded:
reductions are SUMs, never means.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.parallel.microbatch import IGNORE


def count_targets(targets: Tensor) -> int:
    """Number of targets that weigh something."""
    return int((targets != IGNORE).sum())


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the targets that are not IGNORE: a scalar.

    logits: [rows, seq, classes] or [rows, classes]; targets: int64 [rows, seq] or [rows]
    """
    return F.cross_entropy(widened(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def widened(x: Tensor) -> Tensor:
    """x in fp32 at least: what is computed of it adds up many small terms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
