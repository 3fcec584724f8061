"""The pipeline axis: each rank holds a stage of the model, and a step's micro-batches go through the stages in turn.

Training runs by a schedule of torch.distributed.pipelining, which decides in which order a rank computes forwards
and backwards and sends activations on and their gradients back; what is computed, and of which micro-batch, is
ours. Only the number of a micro-batch goes through torch's hands: every rank knows the step's rows already, so a
stage looks up its own masks and lengths (and the ends inputs and targets) by that number. The last stage computes
its loss inside the stage, so that no logits are kept for longer than their backward needs them.

A schedule of torch is prepared for one number of micro-batches of one shape, so there is one for each that comes.
Evaluation is a walk of our own, forward only: torch's `eval` fails under some schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shardlab.parallel.microbatch import MicroBatch

_MOST_PREPARED = 16
"""Schedules kept at a time, each with buffers for what it receives: rows of every length may come."""

Forward = Callable[[Tensor, MicroBatch], Tensor]
"""A stage's work on a micro-batch: of inputs or received activations, gives activations, or the loss at the last."""


class _Stage(nn.Module):
    """What torch calls for each micro-batch, by its number."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self._is_first = is_first
        self.forward_one: Forward
        self.micro_batches: list[MicroBatch]

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        micro_batch = self.micro_batches[int(number)]
        return self.forward_one(micro_batch.inputs if self._is_first else x, micro_batch)


class Pipeline:
    """This rank's end of the pipeline.

    stage, stages: this rank's place, and the number of stages
    group: the ranks of the pipeline, in the order of their stages
    schedule: gpipe (all forwards, then all backwards), 1f1b (a backward as soon as there is one), or naive (one
        micro-batch through all stages and back before the next begins)
    d_model, dtype: of the activations that travel: [rows, seq, d_model]
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        group: ProcessGroup,
        schedule: str,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stage, self.stages = stage, stages
        self._group, self._schedule, self._device = group, schedule, device
        self._d_model, self._dtype = d_model, dtype
        self._module = _Stage(self.is_first)
        self._prepared: dict[tuple[int, ...], Any] = {}

    @property
    def is_first(self) -> bool:
        """This rank has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """This rank has the head, and the losses."""
        return self.stage == self.stages - 1

    def forward_backward(self, forward: Forward, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Run all micro-batches, which have one shape, leaving their gradients in the parameters.

        Returns the micro-batches' losses in their order on the last stage; nothing elsewhere.
        """
        if self._schedule == "naive":
            return [loss for each in micro_batches for loss in self._run(forward, [each])]
        return self._run(forward, micro_batches)

    def forward(self, forward: Forward, micro_batches: list[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Run all micro-batches forward only; the last stage yields each with what `forward` gave, the others nothing.

        To be called without gradients, and used up.
        """
        sent: deque[tuple[dist.Work, Tensor]] = deque()
        for micro_batch in micro_batches:
            x = micro_batch.inputs
            if not self.is_first:
                x = torch.empty((*x.shape, self._d_model), dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._group, group_src=self.stage - 1)
            y = forward(x, micro_batch)
            if self.is_last:
                yield micro_batch, y
            else:
                y = y.contiguous()
                work = dist.isend(y, group=self._group, group_dst=self.stage + 1)
                assert work is not None  # this rank is in the group
                sent.append((work, y))
                if len(sent) > self.stages:
                    sent.popleft()[0].wait()
        for work, _ in sent:
            work.wait()

    def _run(self, forward: Forward, micro_batches: list[MicroBatch]) -> list[Tensor]:
        self._module.forward_one, self._module.micro_batches = forward, micro_batches
        numbers = torch.arange(len(micro_batches))
        losses: list[Tensor] = []
        arguments = (numbers,) if self.is_first else ()
        ends = {"target": numbers, "losses": losses} if self.is_last else {}
        schedule = self._prepare(len(micro_batches), micro_batches[0].inputs)
        try:
            schedule.step(*arguments, number=numbers, return_outputs=False, **ends)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch's wrapper prints the arguments, not what went wrong
        finally:
            del self._module.forward_one, self._module.micro_batches
        return losses

    def _prepare(self, count: int, inputs: Tensor) -> Any:
        """The schedule for `count` micro-batches shaped like `inputs`."""
        key = (count, *inputs.shape)
        if key not in self._prepared:
            if len(self._prepared) == _MOST_PREPARED:  # on every stage at the same step: all see the same shapes
                self._prepared.clear()
            activation = torch.empty(
                (*inputs.shape, self._d_model), dtype=self._dtype, device="meta", requires_grad=True
            )
            stage = PipelineStage(
                self._module,
                self.stage,
                self.stages,
                self._device,
                input_args=torch.empty(1, dtype=torch.int64, device="meta") if self.is_first else activation,
                output_args=torch.empty((), dtype=self._dtype, device="meta") if self.is_last else activation,
                group=self._group,
            )
            # With fewer micro-batches than stages torch refuses 1F1B, whose first stage would be all warm-up: GPipe
            # then takes the same time.
            one_by_one = self._schedule == "1f1b" and count >= self.stages
            schedule = Schedule1F1B if one_by_one else ScheduleGPipe
            # The losses are sums over the whole global batch's targets already: nothing is to be divided.
            self._prepared[key] = schedule(stage, count, loss_fn=_as_it_is, scale_grads=False)
        return self._prepared[key]


def _as_it_is(loss: Tensor, _: Tensor) -> Tensor:
    """The stage has computed the loss."""
    return loss
