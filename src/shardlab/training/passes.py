"""The passes of micro-batches through this rank's part of the model.

Steps and evaluations come through here, and through here alone, so that neither knows whether the model is whole:
without a pipeline the micro-batches go one after the other, with one as its schedule has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardlab.parallel.dropout import Masks
from shardlab.parallel.microbatch import MicroBatch
from shardlab.training.build import Training
from shardlab.training.pulse import beat


def forward_backward(
    training: Training, micro_batches: list[MicroBatch], masks: Callable[[MicroBatch], Masks | None], targets: int
) -> Tensor:
    """Add the micro-batches' gradients to the parameters'; returns this rank's share of the loss, an fp64 scalar.

    masks: the dropout of a micro-batch
    targets: of the whole global batch, by which the loss is divided
    """
    seed = torch.ones((), dtype=training.held[0][1].dtype, device=training.device)

    def forward(stage: int, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        beat()  # what it waited for, in a pipeline, is here
        model = training.models[stage]
        y = model(x, micro_batch.lengths, masks(micro_batch), training.reducer.run)
        y = model.loss(y, micro_batch.targets) / targets if model.head is not None else y
        y.register_hook(_beat_before_backward)
        beat()
        return y

    total = torch.zeros((), dtype=torch.float64, device=training.device)
    if training.pipeline is not None:
        losses = training.pipeline.forward_backward(forward, micro_batches, seed)
    else:
        losses = []
        for micro_batch in micro_batches:
            loss = forward(0, micro_batch.inputs, micro_batch)
            torch.autograd.backward(loss, seed)
            beat()
            losses.append(loss.detach())
    for loss in losses:
        total += loss
    return total


def _beat_before_backward(_: Tensor) -> None:
    """In a pipeline the schedule calls backward, when the gradient has come."""
    beat()


def forward_only(training: Training, micro_batches: list[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield each micro-batch with its logits, without dropout, on the ranks that have the head; nothing elsewhere.

    To be called without gradients, and used up.
    """

    def forward(stage: int, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        beat()
        y: Tensor = training.models[stage](x, micro_batch.lengths, run=training.reducer.run)
        beat()
        return y

    if training.pipeline is not None:
        yield from training.pipeline.forward(forward, micro_batches)
    else:
        for micro_batch in micro_batches:
            yield micro_batch, forward(0, micro_batch.inputs, micro_batch)
