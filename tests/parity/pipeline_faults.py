"""Faults of a pipeline: what travels between stages, a backward pass in two parts, a tied weight at both ends."""

from __future__ import annotations

from dataclasses import replace

import shardlab.parallel.clipping as clipping
import shardlab.training.step as step
from shardlab.parallel.axis import Axis, Done
from shardlab.parallel.pipeline import Message, Pipeline, Post
from shardlab.parallel.schedule import Kind
from shardlab.parallel.weight_gradients import WeightGradients

run = Pipeline.forward_backward


def swap_two_targets() -> None:
    """The outputs of the first two micro-batches are held against each other's targets."""

    def swapped(self: Pipeline, forward, micro_batches, seed):
        a, b, *rest = micro_batches
        return run(self, forward, [replace(a, targets=b.targets), replace(b, targets=a.targets), *rest], seed)

    Pipeline.forward_backward = swapped  # type: ignore[method-assign]


def swap_two_activations() -> None:
    """What the first stage makes of the first two micro-batches changes places on the way to the second."""

    def swapped(self: Pipeline, forward, micro_batches, seed):
        numbers = {each.number: place for place, each in enumerate(micro_batches)}
        other = {0: 1, 1: 0}

        def careless(stage, x, micro_batch):
            place = numbers[micro_batch.number]
            if stage == 0 and place in other:
                micro_batch = micro_batches[other[place]]
                x = micro_batch.inputs
            return forward(stage, x, micro_batch)

        return run(self, careless, micro_batches, seed)

    Pipeline.forward_backward = swapped  # type: ignore[method-assign]


def stale_activations() -> None:
    """A stage reads what had come before what it waits for."""
    take = Post.take

    def careless(self: Post, message: Message):
        x = take(self, message)
        if message.kind is not Kind.F:
            return x
        last = vars(self).setdefault("_last", {})
        stale, last[message.stage] = last.get(message.stage, x), x.detach().clone()
        return stale

    Post.take = careless  # type: ignore[method-assign]


def drop_a_gradient_on_the_way() -> None:
    """The second micro-batch's gradient arrives as zeros."""
    take = Post.take

    def careless(self: Post, message: Message):
        x = take(self, message)
        return x.zero_() if message.kind is Kind.I and message.micro_batch == 1 else x

    Post.take = careless  # type: ignore[method-assign]


def hooks_of_data_parallelism() -> None:
    """A weight's gradient is announced by its backward's hook, as DDP would have it; the part put off comes after."""
    add, start_sum = WeightGradients.add, Axis.start_sum

    def careless(self: WeightGradients, weight, x, gradient):
        if self._key is not None:
            self._arrived(weight)
        add(self, weight, x, gradient)

    def compute(self: WeightGradients, key):
        arrived, self._arrived = self._arrived, lambda _: None
        for each in self._put_off.pop(key, []):
            self._add(each)
        self._arrived = arrived

    def at_once(self: Axis, x):  # or what is added meanwhile might still be in time
        start_sum(self, x).wait()
        return Done()

    WeightGradients.add, WeightGradients.compute = careless, compute  # type: ignore[method-assign]
    Axis.start_sum = at_once  # type: ignore[method-assign]


def forget_what_was_put_off() -> None:
    """The second parts of the first micro-batch's backward are never done."""
    compute = WeightGradients.compute

    def careless(self: WeightGradients, key):
        if key[1] == 0:
            self._put_off.pop(key, None)
        compute(self, key)

    WeightGradients.compute = careless  # type: ignore[method-assign]


def clip_per_stage() -> None:
    """Each stage is clipped by its own norm; the whole one is recorded."""
    clip = step.clip

    def careless(held, norm, largest):
        own = sum(p.grad.square().sum() for _, p in held).sqrt()
        clip(held, own, largest)

    step.clip = careless


def count_a_tied_gradient_twice() -> None:
    """Both ends of the pipeline add the tied weight's gradient to the norm."""

    def careless(trained, table, part, mesh):
        layers = {entry.layer for entry in table}
        return clipping.global_norm(trained, table, replace(part, layers=layers), mesh)

    step.global_norm = careless


def leave_a_tied_gradient_alone() -> None:
    """Each end updates its copy by the gradient of its own use."""
    step.sum_tied = lambda *_: None


def sum_a_tied_gradient_twice() -> None:
    """Both ends add what the other one has summed already."""
    once = step.sum_tied

    def careless(*arguments):
        once(*arguments)
        once(*arguments)

    step.sum_tied = careless


PIPELINE_FAULTS = (
    swap_two_targets,
    swap_two_activations,
    stale_activations,
    drop_a_gradient_on_the_way,
    hooks_of_data_parallelism,
    forget_what_was_put_off,
    clip_per_stage,
    count_a_tied_gradient_twice,
    leave_a_tied_gradient_alone,
    sum_a_tied_gradient_twice,
)
