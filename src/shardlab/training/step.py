"""One step: forward and backward of this rank's micro-batches, the gradients' SUM, the norm, clipping, the update.

A step whose loss or norm is not finite updates nothing (nonfinite.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardlab.data.dataset import Batch
from shardlab.models.transformer import dropout_sites
from shardlab.parallel.clipping import clip, global_norm
from shardlab.parallel.dropout import Masks, step_keys
from shardlab.parallel.loss import count_targets
from shardlab.parallel.mesh import LOSS_AXES
from shardlab.parallel.microbatch import MicroBatch
from shardlab.parallel.sequence import sum_slices
from shardlab.parallel.tied import sum_tied
from shardlab.training.build import Training
from shardlab.training.nonfinite import lost_micro_batch, skip_or_end
from shardlab.training.passes import forward_backward
from shardlab.training.precision import unscale
from shardlab.training.pulse import beat


@dataclass(frozen=True)
class StepResult:
    """loss: nats per target over the whole global batch; grad_norm: before clipping, without fp16's loss scale.

    loss_scale: that the step was computed with, under fp16; skipped: it was no update
    """

    loss: float
    grad_norm: float
    loss_scale: float | None = None
    skipped: bool = False

    @property
    def of_precision(self) -> dict[str, float | bool]:
        """What the step's event says of its numbers; nothing, in most runs."""
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale}
        return scale | ({"skipped": True} if self.skipped else {})


def train_step(training: Training, batch: Batch, step: int, lr: float) -> StepResult:
    """Train on one global batch, of which every rank is given all rows. step: 1.. ; keys the dropout masks.

    Raises RunEnded, on all ranks, if a number is not finite and the run is therefore to end.
    """
    config, trained = training.config, training.reducer.trained
    scale = training.loss_scale
    scaled_by = None if scale is None else scale.value
    mine = training.micro_batches(batch)
    losses = gradients(training, batch, mine, step)
    loss = step_loss(training, losses)
    if scale is not None:
        unscale(trained, scale)
    norm = global_norm(trained, training.table, training.part, training.mesh)
    # Both are numbers of the whole mesh, and the norm is not finite exactly if some gradient is not: so it is fp16's
    # found_inf too, agreed without a collective of its own. Copies can't disagree: their gradients are the same bits.
    loss_now, norm_now = torch.stack([loss, norm]).tolist()
    result = StepResult(loss_now, norm_now, scaled_by)
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        lost = lost_micro_batch(training.mesh, mine, losses)
        policy = config.trainer.on_nonfinite
        skip_or_end(step, lost, result.grad_norm, policy, training.skipped, scale)
        return replace(result, skipped=True)
    update(training, norm, lr)
    training.skipped.in_a_row = 0
    if scale is not None:
        scale.grow()
    return result


def update(training: Training, norm: Tensor, lr: float) -> None:
    """Clip the gradients and change the parameters by them."""
    trained, largest = training.reducer.trained, training.config.trainer.clip
    if largest is not None:
        clip(trained, norm, largest)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    training.optimizer.step()
    training.reducer.publish()
    beat()


def gradients(training: Training, batch: Batch, mine: list[MicroBatch], step: int) -> list[Tensor]:
    """Leave the step's summed gradients, times the loss scale, in the parameters; returns the micro-batches' losses.

    mine: this rank's micro-batches of the batch
    """
    reducer, p, scale = training.reducer, training.shape.dropout, training.loss_scale
    keys = step_keys(training.config.seed, step, dropout_sites(training.shape) if p > 0 else [], training.device)

    def masks(micro_batch: MicroBatch) -> Masks | None:
        return Masks(keys, micro_batch.rows, p) if p > 0 else None

    reducer.start(len(mine))
    targets = count_targets(batch.targets)
    losses = forward_backward(training, mine, masks, targets, 1.0 if scale is None else scale.value)
    reducer.finish()
    sum_slices(reducer.trained, training.mesh.axes["tensor"])
    sum_tied(reducer.trained, training.table, training.part, training.mesh.axes["pipeline"])
    beat()
    return losses


def step_loss(training: Training, losses: list[Tensor]) -> Tensor:
    """The step's loss, an fp64 scalar equal on every rank. losses: of this rank's micro-batches"""
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for loss in losses:
        total += loss
    return training.mesh.sum(total, LOSS_AXES)
