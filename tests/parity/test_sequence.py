"""Sequence parallel and activation checkpointing: what is cut, or computed again, trains the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trained
from trained import Trained, difference, evaluation, train

import shardlab.parallel.sequence as sequence
import shardlab.training.passes as passes
import shardlab.training.step as step
from shardlab.parallel.tensor import enter
from shardlab.training.loop import train_rank
from shardlab.training.place import Place

SMALL = [
    "seed=3",
    "model=tiny",
    "model.n_layers=2",
    "model.d_model=16",
    "model.d_ff=32",
    "model.dropout=0.2",
    "precision=fp64",
    "trainer.global_batch=13",
    "trainer.micro_batch=4",
    "trainer.clip=0.1",
    "trainer.steps=4",
    "trainer.eval_batches=2",
    "optimizer=sgd",
    "optimizer.lr=0.5",
    "optimizer.kwargs.momentum=0.9",
]
LANGUAGE, CLASSES = ["dataset=pydoc"], ["dataset=synthetic", "dataset.task=classifier"]
PRE, THIRTEEN, TIE = ["model.norm=pre", "model.positions=learned"], ["dataset.seq_len=13"], ["model.tie=true"]

SLICES = ["strategy.sequence_parallel=true"]
TWO, FOUR = ["strategy=tensor", "ranks=2", *SLICES], ["strategy=tensor", "ranks=4", *SLICES]
PIPELINE = ["strategy=hybrid", "ranks=4", *SLICES]
ZERO = ["strategy=hybrid", "ranks=4", "strategy.pipeline=1", "strategy.shard=2", *SLICES]
ZBV = ["strategy.schedule=zbv"]
AGAIN = ["strategy.activation_checkpoint=always"]
BUT_LAST = ["strategy.activation_checkpoint=except_last"]

CASES = [
    # strategy                                                         task and model
    (TWO, LANGUAGE),
    (TWO, [*LANGUAGE, *PRE, *THIRTEEN]),
    (TWO, [*CLASSES, *PRE]),
    (FOUR, CLASSES),
    (FOUR, [*LANGUAGE, *PRE, *THIRTEEN]),  # slices of 4, 4, 4 and 1 with three of padding
    (PIPELINE, [*LANGUAGE, *PRE, *THIRTEEN]),
    ([*PIPELINE, *ZBV], CLASSES),
    (ZERO, [*LANGUAGE, *TIE]),
    (["strategy=single", *AGAIN], LANGUAGE),
    (["strategy=single", *BUT_LAST], [*CLASSES, *PRE]),
    (["strategy=pipeline", "ranks=2", *ZBV, *BUT_LAST], LANGUAGE),
    (["strategy=zero3", "ranks=2", *AGAIN], [*CLASSES, *PRE]),
    ([*TWO, *AGAIN], LANGUAGE),
    ([*PIPELINE, *ZBV, *BUT_LAST], [*LANGUAGE, *PRE, *THIRTEEN]),
    ([*ZERO, *AGAIN], [*LANGUAGE, *TIE]),
]
TOLERANCE = 1e-9

_references: dict[tuple[str, ...], Trained] = {}


def one_process(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> Trained:
    """The run that the others are held against, trained once."""
    key = tuple(parts)
    if key not in _references:
        _references[key] = train(tmp_path_factory.mktemp("single") / "run", [*SMALL, *parts, "strategy=single"])
    return _references[key]


@pytest.mark.parametrize(("strategy", "parts"), CASES)
def test_same_run_as_one_process(strategy, parts, tmp_path, tmp_path_factory):
    reference = one_process(tmp_path_factory, parts)
    run = train(tmp_path / "run", [*SMALL, *parts, *strategy])
    assert difference(reference, run) < TOLERANCE
    for one, other in zip(*(evaluation(record) for record in (reference, run)), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)


def norm_bias_not_summed(place: Place, *arguments) -> None:
    """Each rank keeps the gradient that its own positions give to the norms' biases."""
    summed = sequence.sum_slices

    def careless(members, axis):
        summed([member for member in members if not member[0].name.endswith("norm.bias")], axis)

    step.sum_slices = careless
    train_rank(place, *arguments)


def first_tokens_counted_by_every_rank(place: Place, *arguments) -> None:
    """The gradient of the classifier's first tokens is summed over the ranks, which all have the whole of it."""
    leave = sequence.leave
    sequence.leave = lambda x, axis: enter(leave(x, axis), axis)
    train_rank(place, *arguments)


def masks_of_another_step(place: Place, *arguments) -> None:
    """A layer that is computed again drops by other keys than the first time."""
    checkpoint = passes.checkpoint

    def careless(function, x, **options):
        masks, count = function.keywords["masks"], iter(range(9))

        def compute(x):
            again = next(count) > 0
            return partial(function, masks=masks and replace(masks, keys=masks.keys + again))(x)

        return checkpoint(compute, x, **options)

    passes.checkpoint = careless
    train_rank(place, *arguments)


FAULTS = [
    (norm_bias_not_summed, TWO, LANGUAGE),
    (first_tokens_counted_by_every_rank, FOUR, CLASSES),
    (masks_of_another_step, ["strategy=single", *AGAIN], LANGUAGE),
    (masks_of_another_step, [*TWO, *AGAIN], LANGUAGE),
]


@pytest.mark.parametrize(("fault", "strategy", "parts"), FAULTS)
def test_a_planted_fault_is_caught(fault, strategy, parts, tmp_path: Path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(trained, "train_rank", fault)
    broken = train(tmp_path / "run", [*SMALL, *parts, *strategy])
    monkeypatch.undo()
    assert difference(one_process(tmp_path_factory, parts), broken) > 1e4 * TOLERANCE
