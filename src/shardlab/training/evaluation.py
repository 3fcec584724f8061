"""Evaluation: exact over all ranks, each row once, weighed by targets.

Ranks add up counts (targets, and a classifier's confusion matrix) and one loss sum; the metrics are computed from
the totals, so that no mean of means ever enters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardlab.data.rows import feed
from shardlab.parallel.mesh import LOSS_AXES
from shardlab.parallel.microbatch import IGNORE
from shardlab.training.build import Training
from shardlab.training.passes import forward_only
from shardlab.training.pulse import beat


@torch.no_grad()
def evaluate(training: Training, split: str, batches: int | None = None) -> dict[str, float]:
    """Metrics of the live model on a split; the same on every rank.

    batches: stop after that many global batches; None takes all

    Returns loss (nats per target) and targets (their number), with perplexity for a language model, or accuracy,
    f1, precision and recall of class 1 for a classifier.
    """
    config, classes = training.config, training.shape.classes
    loss = torch.zeros((), dtype=torch.float64, device=training.device)
    confusion = torch.zeros(max(1, classes) ** 2, dtype=torch.float64, device=training.device)
    for batch in feed(
        training.dataset, split, global_batch=config.trainer.global_batch, seed=config.seed, epoch=0, stop=batches
    ):
        for micro_batch, logits in forward_only(training, training.micro_batches(batch)):
            assert training.head is not None
            loss += training.head.loss(logits, micro_batch.targets)
            confusion += count(logits, micro_batch.targets, classes)
        beat()
    totals = training.mesh.agree(training.mesh.sum(torch.cat([loss.view(1), confusion]), LOSS_AXES)).tolist()
    beat()
    return metrics(totals[0], totals[1:])


def count(logits: Tensor, targets: Tensor, classes: int) -> Tensor:
    """A classifier's confusion matrix, flat: [true class * classes + predicted class]; else [number of targets]."""
    valid = targets != IGNORE
    if not classes:
        return valid.sum().view(1)
    pairs = targets * classes + logits.argmax(-1)
    return torch.stack([((pairs == pair) & valid).sum() for pair in range(classes**2)])


def metrics(loss_sum: float, confusion: list[float]) -> dict[str, float]:
    """From totals over all ranks. confusion: see `count`; precision, recall and f1 are 0 where nothing is counted."""
    targets = sum(confusion)
    loss = loss_sum / targets
    shown = {"loss": loss, "targets": int(targets)}
    if len(confusion) == 1:
        return shown | {"perplexity": math.exp(loss) if loss < 700 else math.inf}
    true_negative, false_positive, false_negative, true_positive = confusion
    precision = true_positive / max(1, true_positive + false_positive)
    recall = true_positive / max(1, true_positive + false_negative)
    return shown | {
        "accuracy": (true_positive + true_negative) / targets,
        "f1": 2 * true_positive / max(1, 2 * true_positive + false_positive + false_negative),
        "precision": precision,
        "recall": recall,
    }
