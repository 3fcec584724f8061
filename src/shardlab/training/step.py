"""One step: forward and backward of this rank's micro-batches, the gradients' SUM, the norm, clipping, the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlab.data.dataset import Batch
from shardlab.models.transformer import dropout_sites
from shardlab.parallel.clipping import clip, global_norm
from shardlab.parallel.dropout import Masks, step_keys
from shardlab.parallel.loss import count_targets, summed_cross_entropy
from shardlab.parallel.mesh import DATA_AXES
from shardlab.training.build import Training


@dataclass(frozen=True)
class StepResult:
    """loss: nats per target over the whole global batch; grad_norm: before clipping."""

    loss: float
    grad_norm: float


def train_step(training: Training, batch: Batch, step: int, lr: float) -> StepResult:
    """Train on one global batch, of which every rank is given all rows. step: 1.. ; keys the dropout masks."""
    config = training.config
    loss = forward_backward(training, batch, step)
    norm = global_norm(training.held)
    if config.trainer.clip is not None:
        clip(training.held, norm, config.trainer.clip)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    training.optimizer.step()
    return StepResult(float(loss), float(norm))


def forward_backward(training: Training, batch: Batch, step: int) -> torch.Tensor:
    """Leave the step's summed gradients in the parameters; returns its loss, an fp64 scalar equal on every rank."""
    model, reducer, p = training.model, training.gradient_sum, training.shape.dropout
    keys = step_keys(training.config.seed, step, dropout_sites(training.shape) if p > 0 else [], training.device)
    targets = count_targets(batch.targets)
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    reducer.zero()
    mine = training.micro_batches(batch)
    for micro_batch in mine:
        if micro_batch is mine[-1]:
            reducer.overlap()
        masks = Masks(keys, micro_batch.rows, p) if p > 0 else None
        logits = model(micro_batch.inputs, micro_batch.lengths, masks)
        loss = summed_cross_entropy(logits, micro_batch.targets) / targets
        loss.backward()
        total += loss.detach()
    reducer.finish()
    return training.mesh.sum(total, DATA_AXES)
