"""A step whose loss or gradient norm is not finite: every rank finds the same reason, and nothing is updated.

Whether a step is one costs nothing to know: its loss and the norm of its gradients are sums over the mesh, the same on
every rank, and a number that is not finite anywhere makes one of them so. Only then do the ranks look whose
micro-batch it was, by one small collective, so that all of them end with the same line, or go on together.

What happens then is `trainer.on_nonfinite`: the run ends, or the step is skipped. One case is neither a failure nor an
option: gradients that overflow at fp16's loss scale, with a finite loss. The step is skipped and the scale halved,
until there is nothing left to halve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.config.schema import OnNonFinite
from shardlab.errors import RunEnded
from shardlab.parallel.mesh import Connected
from shardlab.parallel.microbatch import MicroBatch
from shardlab.training.precision import SMALLEST_SCALE, LossScale

MOST_SKIPPED = 100
"""Steps in a row that on_nonfinite=skip leaves out: the model hasn't changed since the first, and won't."""

_VALUES = ("nan", "inf", "-inf")
_NOBODY = 2**62


@dataclass
class Skipped:
    """in_a_row: how many of the last steps were skipped"""

    in_a_row: int = 0


def lost_micro_batch(mesh: Connected, micro_batches: list[MicroBatch], losses: list[Tensor]) -> str | None:
    """The first micro-batch of the step whose loss is not finite, in words that all ranks share; None if there is none.

    micro_batches: this rank's; losses: theirs, or none where another rank has the head. All ranks must call it.

    Number, rank and value travel as one integer, of which the least is taken.
    """
    key = _NOBODY
    for micro_batch, loss in zip(micro_batches, losses, strict=False):
        if not math.isfinite(value := float(loss)):
            place = micro_batch.number * mesh.mesh.ranks + mesh.rank
            key = min(key, place * len(_VALUES) + _VALUES.index(str(value)))
    device = micro_batches[0].inputs.device
    least = torch.tensor(key, dtype=torch.int64, device=device)
    for axis in mesh.axes.values():
        axis.all_reduce(least, dist.ReduceOp.MIN)
    if (key := int(least)) == _NOBODY:
        return None
    place, value = divmod(key, len(_VALUES))
    number, rank = divmod(place, mesh.mesh.ranks)
    return f"the loss of micro-batch {number} on rank {rank} is {_VALUES[value]}"


def skip_or_end(
    step: int, lost: str | None, norm: float, policy: OnNonFinite, skipped: Skipped, scale: LossScale | None
) -> None:
    """Account for a step that is not finite, and must therefore update nothing; the same on all ranks.

    lost: what `lost_micro_batch` said; norm: of the gradients, unscaled

    Raises RunEnded if the run is not to go on; a skipped step's reason goes to the rank's log.
    """
    skipped.in_a_row += 1
    at = "" if scale is None else f" at a loss scale of {scale.value:g}"
    reason = lost or f"the gradient norm is {norm}{at}"
    if lost is None and scale is not None and scale.value > SMALLEST_SCALE:
        scale.back_off()
        print(f"step {step}: {reason}; skipped, the scale is halved")
        return
    if policy is OnNonFinite.stop:
        would = "trainer.on_nonfinite=skip" if lost or not at else "precision=bf16"
        raise RunEnded(f"step {step}: {reason}; nothing was updated, {would} would go on")
    if skipped.in_a_row >= MOST_SKIPPED:
        raise RunEnded(
            f"step {step}: {reason}; it is the last of {MOST_SKIPPED} skipped steps in a row, and nothing would change"
        )
    print(f"step {step}: {reason}; skipped")
