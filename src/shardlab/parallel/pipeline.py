"""The pipeline axis: each rank holds one stage of the model or more, and a step's micro-batches go through all in turn.

A schedule (orders.py) says in which order a rank computes forwards and backwards; from the orders of all ranks follows
a grid of turns (schedule.py). A rank walks along its row: it computes what stands there, and after each turn sends what
it has made and begins to receive what others have made for it, as one batch. Since all ranks know the whole grid, both
ends of a transfer post it in the same turn: nothing is announced, and no order of posting can deadlock. On gloo a rank
waits only when it needs what has not come; nccl makes one work of a batch, so there it also waits for what it sends in
that turn to be received.

Only activations and their gradients travel. Every rank knows the step's rows already, so a stage looks up its own masks
and lengths (and the ends inputs and targets). The last stage computes its loss inside the stage, so that no logits
are kept for longer than their backward needs them.

Not torch.distributed.pipelining: its schedules take 3 s to import, which a plan may not; are prepared anew, with
buffers for all micro-batches, for each shape; call hooks of data parallelism only where the backward pass is not split;
and can't evaluate under some orders. tests/unit/test_schedule.py holds our orders against its.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from shardlab.parallel.axis import Axis, Pending
from shardlab.parallel.microbatch import MicroBatch
from shardlab.parallel.orders import forward_only, orders, placement, runnable
from shardlab.parallel.schedule import Action, Kind, Orders, grid
from shardlab.parallel.weight_gradients import WeightGradients

Forward = Callable[[int, Tensor, MicroBatch], Tensor]
"""A stage's work on a micro-batch: of its number and inputs or received activations, gives activations, or the loss."""


@dataclass(frozen=True)
class Message:
    """What one stage makes for the next or the one before. kind: F, activations; I, their gradient"""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def to(self) -> int:
        """The stage that it is for."""
        return self.stage + (1 if self.kind is Kind.F else -1)


@dataclass(frozen=True)
class Turn:
    """What a rank does in a turn, and what it sends and receives after that, each with the other rank."""

    action: Action | None
    sends: list[tuple[Message, int]]
    receives: list[tuple[Message, int]]


def message(action: Action, stages: int) -> Message | None:
    """What an action makes for another stage."""
    if action.kind is Kind.W:
        return None
    kind = Kind.F if action.kind is Kind.F else Kind.I
    made = Message(kind, action.stage, action.micro_batch)
    return made if 0 <= made.to < stages else None


def turns(rows: Orders, stages_of: list[list[int]], rank: int) -> list[Turn]:
    """A rank's way through the grid. stages_of: by rank, the stages that it holds"""
    holder = {stage: other for other, stages in enumerate(stages_of) for stage in stages}
    way = []
    for together in zip(*grid(rows), strict=True):
        sends, receives = [], []
        for other, action in enumerate(together):
            made = None if action is None else message(action, len(holder))
            if made is None or holder[made.to] == other:
                continue
            if other == rank:
                sends.append((made, holder[made.to]))
            elif holder[made.to] == rank:
                receives.append((made, other))
        way.append(Turn(together[rank], sends, receives))
    return way


class Pipeline:
    """This rank's end of the pipeline.

    axis: of the pipeline
    schedule: see orders.py; where it can't run with a step's number of micro-batches, `runnable` says which one does
    stages_per_rank: how many stages each rank holds
    shape: of the activations of a micro-batch, as they travel
    weight_gradients: of this rank's models, for schedules that split the backward pass
    """

    def __init__(
        self,
        axis: Axis,
        schedule: str,
        stages_per_rank: int,
        shape: Callable[[MicroBatch], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        weight_gradients: WeightGradients,
    ) -> None:
        self._axis, self._schedule, self._shape = axis, schedule, shape
        self._dtype, self._device = dtype, device
        self._weight_gradients = weight_gradients
        self._stages_of = placement(schedule, axis.ranks, stages_per_rank)
        self._last = axis.ranks * stages_per_rank - 1
        self._way = lru_cache(self._find_way)

    def forward_backward(self, forward: Forward, micro_batches: list[MicroBatch], seed: Tensor) -> list[Tensor]:
        """Run all micro-batches, which have one shape, leaving their gradients in the parameters.

        seed: the gradient of each loss, a scalar

        Returns the micro-batches' losses in their order on the rank of the last stage; nothing elsewhere.
        """
        step = _Step(forward, micro_batches, seed, Post(self._axis, self._receive_buffer(micro_batches)))
        for turn in self._way(len(micro_batches), train=True):
            if turn.action is not None:
                self._compute(turn.action, step)
            step.post.turn(turn)
        step.post.finish()
        return [step.losses[number] for number in sorted(step.losses)]

    def _compute(self, action: Action, step: _Step) -> None:
        stage, number = place = action.stage, action.micro_batch
        if action.kind is Kind.W:
            self._weight_gradients.compute(place)
            return
        if action.kind is Kind.F:
            micro_batch = step.micro_batches[number]
            x = micro_batch.inputs
            if stage > 0:
                x = step.post.take(Message(Kind.F, stage - 1, number)).requires_grad_()
            y = step.forward(stage, x, micro_batch)
            step.kept[place] = x, y
            if stage == self._last:
                step.losses[number] = y.detach()
            else:
                step.post.put(Message(Kind.F, stage, number), y.detach())
            return
        x, y = step.kept.pop(place)
        gradient = step.seed if stage == self._last else step.post.take(Message(Kind.I, stage + 1, number))
        with self._weight_gradients.putting_off(place) if action.kind is Kind.I else nullcontext():
            torch.autograd.backward(y, gradient)
        if stage > 0:
            assert x.grad is not None
            step.post.put(Message(Kind.I, stage, number), x.grad)

    def forward(self, forward: Forward, micro_batches: list[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Run all micro-batches forward only; the rank of the last stage yields each with what `forward` gave, the
        others nothing.

        To be called without gradients, and used up.
        """
        post = Post(self._axis, self._receive_buffer(micro_batches))
        for turn in self._way(len(micro_batches), train=False):
            done = None
            if turn.action is not None:
                stage, micro_batch = turn.action.stage, micro_batches[turn.action.micro_batch]
                number = turn.action.micro_batch
                x = micro_batch.inputs if stage == 0 else post.take(Message(Kind.F, stage - 1, number))
                y = forward(stage, x, micro_batch)
                if stage == self._last:
                    done = micro_batch, y
                else:
                    post.put(Message(Kind.F, stage, number), y)
            post.turn(turn)
            if done is not None:
                yield done
        post.finish()

    def _find_way(self, count: int, train: bool) -> list[Turn]:
        """This rank's turns for so many micro-batches."""
        ranks, per_rank = self._axis.ranks, len(self._stages_of[0])
        if train:
            rows = orders(runnable(self._schedule, ranks, per_rank, count), ranks, per_rank, count)
        else:
            rows = forward_only(self._stages_of, count)
        return turns(rows, self._stages_of, self._axis.rank)

    def _receive_buffer(self, micro_batches: list[MicroBatch]) -> Callable[[], Tensor]:
        shape = self._shape(micro_batches[0])
        return lambda: torch.empty(shape, dtype=self._dtype, device=self._device)


@dataclass(frozen=True)
class _Step:
    """One step on this rank: what it is given, what is on its way, inputs and outputs kept for backward, and losses."""

    forward: Forward
    micro_batches: list[MicroBatch]
    seed: Tensor
    post: Post
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


class Post:
    """What is on its way between this rank's stages and the others'.

    buffer: makes a tensor to receive into
    """

    def __init__(self, axis: Axis, buffer: Callable[[], Tensor]) -> None:
        self._axis, self._buffer = axis, buffer
        self._here: dict[Message, Tensor] = {}
        self._coming: dict[Message, Pending] = {}
        self._leaving: deque[tuple[Pending, Tensor]] = deque()

    def put(self, message: Message, x: Tensor) -> None:
        """Have x taken by another stage of this rank, or sent at the end of this turn."""
        self._here[message] = x.contiguous()

    def take(self, message: Message) -> Tensor:
        """What was put, or received, when it has come."""
        if message in self._coming:
            self._coming.pop(message).wait()
        return self._here.pop(message)

    def turn(self, turn: Turn) -> None:
        """Send and begin to receive what the turn says."""
        sends = [(self._here.pop(message), peer) for message, peer in turn.sends]
        receives = [(self._buffer(), peer) for _, peer in turn.receives]
        works = self._axis.exchange(sends, receives)
        leaving, coming = works[: len(sends)], works[len(sends) :]
        for (message, _), (x, _), work in zip(turn.receives, receives, coming, strict=True):
            self._here[message], self._coming[message] = x, work
        self._leaving.extend((work, x) for work, (x, _) in zip(leaving, sends, strict=True))
        while len(self._leaving) > 2 * self._axis.ranks:  # what was sent long ago has been received, or soon will be
            self._leaving.popleft()[0].wait()

    def finish(self) -> None:
        """Return when everything has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()
