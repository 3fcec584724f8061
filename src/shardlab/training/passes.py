"""The passes of micro-batches through this rank's part of the model.

Steps and evaluations come through here, and through here alone, so that neither knows whether the model is whole:
without a pipeline the micro-batches go one after the other, with one as its schedule has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardlab.config.schema import Checkpoint
from shardlab.parallel.dropout import Masks
from shardlab.parallel.microbatch import MicroBatch
from shardlab.training.build import Training
from shardlab.training.precision import autocast
from shardlab.training.pulse import beat


def forward_backward(
    training: Training,
    micro_batches: list[MicroBatch],
    masks: Callable[[MicroBatch], Masks | None],
    targets: int,
    scale: float = 1.0,
) -> list[Tensor]:
    """Add the micro-batches' gradients to the parameters'; returns their shares of the loss, scalars, on the ranks that
    have the head, and nothing elsewhere.

    masks: the dropout of a micro-batch
    targets: of the whole global batch, by which the loss is divided
    scale: what all gradients are multiplied by
    """
    seed = torch.full((), scale, dtype=training.held[0][1].dtype, device=training.device)

    checkpointed = checkpointed_micro_batches(training.config.strategy.activation_checkpoint, micro_batches)

    def forward(stage: int, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        beat()  # what it waited for, in a pipeline, is here
        model = training.models[stage]
        run = partial(_checkpointed, training) if micro_batch.number in checkpointed else training.reducer.run
        with autocast(training.config.precision.name, training.device):
            y = model(x, micro_batch.lengths, masks(micro_batch), run, micro_batch.inputs.shape[1])
        y = model.loss(y, micro_batch.targets) / targets if model.head is not None else y
        y.register_hook(_beat_before_backward)
        beat()
        return y

    if training.pipeline is not None:
        return training.pipeline.forward_backward(forward, micro_batches, seed)
    losses = []
    for micro_batch in micro_batches:
        loss = forward(0, micro_batch.inputs, micro_batch)
        torch.autograd.backward(loss, seed)
        beat()
        losses.append(loss.detach())
    return losses


def checkpointed_micro_batches(which: Checkpoint, micro_batches: list[MicroBatch]) -> set[int]:
    """The numbers of those micro-batches of a rank's step whose layers keep their inputs alone for backward."""
    if which is Checkpoint.never:
        return set()
    kept = micro_batches[-1:] if which is Checkpoint.except_last else []
    return {micro_batch.number for micro_batch in micro_batches} - {micro_batch.number for micro_batch in kept}


def _checkpointed(training: Training, place: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a place of the model; a layer keeps nothing but its input, and is computed again in backward.

    The reducer stands outside: when the layer is computed again, its parameters have just been gathered for backward.
    Nothing random needs to be kept: the masks are a function of the step.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    if 0 <= place < training.shape.n_layers:
        function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return training.reducer.run(place, function, x)


def _beat_before_backward(_: Tensor) -> None:
    """In a pipeline the schedule calls backward, when the gradient has come."""
    beat()


def forward_only(training: Training, micro_batches: list[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield each micro-batch with its logits, without dropout, on the ranks that have the head; nothing elsewhere.

    To be called without gradients, and used up.
    """

    def forward(stage: int, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        beat()
        seq = micro_batch.inputs.shape[1]
        with autocast(training.config.precision.name, training.device):
            y: Tensor = training.models[stage](x, micro_batch.lengths, run=training.reducer.run, seq=seq)
        beat()
        return y

    if training.pipeline is not None:
        yield from training.pipeline.forward(forward, micro_batches)
    else:
        for micro_batch in micro_batches:
            yield micro_batch, forward(0, micro_batch.inputs, micro_batch)
