"""One step: forward and backward of this rank's micro-batches, the gradients' SUM, the norm, clipping, the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
from shardlab.training.passes import forward_backward
from shardlab.training.pulse import beat


@dataclass(frozen=True)
class StepResult:
    """loss: nats per target over the whole global batch; grad_norm: before clipping."""

    loss: float
    grad_norm: float


def train_step(training: Training, batch: Batch, step: int, lr: float) -> StepResult:
    """Train on one global batch, of which every rank is given all rows. step: 1.. ; keys the dropout masks."""
    config = training.config
    loss = gradients(training, batch, step)
    trained = training.reducer.trained
    norm = global_norm(trained, training.table, training.part, training.mesh)
    if config.trainer.clip is not None:
        clip(trained, norm, config.trainer.clip)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    training.optimizer.step()
    training.reducer.publish()
    beat()
    return StepResult(float(loss), float(norm))


def gradients(training: Training, batch: Batch, step: int) -> torch.Tensor:
    """Leave the step's summed gradients in the parameters; returns its loss, an fp64 scalar equal on every rank."""
    reducer, p = training.reducer, training.shape.dropout
    keys = step_keys(training.config.seed, step, dropout_sites(training.shape) if p > 0 else [], training.device)

    def masks(micro_batch: MicroBatch) -> Masks | None:
        return Masks(keys, micro_batch.rows, p) if p > 0 else None

    mine = training.micro_batches(batch)
    reducer.start(len(mine))
    loss = forward_backward(training, mine, masks, count_targets(batch.targets))
    reducer.finish()
    sum_slices(reducer.trained, training.mesh.axes["tensor"])
    sum_tied(reducer.trained, training.table, training.part, training.mesh.axes["pipeline"])
    beat()
    return training.mesh.sum(loss, LOSS_AXES)
