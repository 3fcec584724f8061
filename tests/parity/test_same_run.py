"""One config, one run, beside the matrix of mixes (test_matrix.py): odd cuts, short batches, fp32, identical bits."""

from __future__ import annotations

import math
import os

import pytest
from trained import Trained, difference, evaluation, identical, same_bits, train

from shardlab.launch.ranks import run_ranks

# A small size keeps the suite short: what could differ is not in the size.
SMALL = ["seed=3", "model=tiny", "model.n_layers=2", "model.d_model=16", "model.d_ff=32", "model.dropout=0.2"]
STABLE = [*SMALL, "trainer.steps=20", "trainer.eval_batches=2", "trainer.test=true"]
RAGGED = ["trainer.global_batch=13", "trainer.clip=0.1", "precision=fp64"]
STAND_INS = {
    "pydoc": ["dataset=pydoc", "optimizer=sgd", "optimizer.lr=0.5", "optimizer.kwargs.momentum=0.9"],
    "synthetic": ["dataset=synthetic", "dataset.task=classifier", "optimizer=adamw", "optimizer.lr=1e-3"],
}
REAL = {
    "wikitext2": [
        "dataset=wikitext2",
        "dataset.seq_len=16",
        "optimizer=sgd",
        "optimizer.lr=0.5",
        "optimizer.kwargs.momentum=0.9",
    ],
    "nsmc": ["dataset=nsmc", "optimizer=adamw", "optimizer.lr=1e-3"],
}
# The real corpora where they are; wikitext2's 28,782 words don't divide by 4.
TASKS = REAL if "SHARDLAB_DATA" in os.environ else STAND_INS
FOURS, PIPELINE, HYBRID = ["trainer.micro_batch=4"], ["strategy=pipeline"], ["strategy=hybrid", "ranks=4"]
GPIPE, TENSOR = ["strategy.schedule=gpipe"], ["strategy=tensor"]
CUTS = [
    # strategy, how the step is cut; the meshes and schedules themselves are the matrix's (test_matrix.py)
    (["strategy=single"], ["trainer.micro_batches=13"]),
    ([*TENSOR, "ranks=4"], FOURS),
    ([*PIPELINE, "ranks=3", *GPIPE, "strategy.split=[0,2,0]"], FOURS),
    # fewer parts than the schedule is made for, or a number that it can't take: another one runs in its place
    ([*PIPELINE, "ranks=3"], ["trainer.micro_batches=2"]),
    ([*PIPELINE, "ranks=2", "strategy.schedule=zbv"], ["trainer.micro_batches=2"]),
    ([*PIPELINE, "ranks=2", "strategy.schedule=dualpipev"], ["trainer.micro_batches=3"]),
    ([*PIPELINE, "ranks=2", "strategy.schedule=interleaved_zero_bubble"], ["trainer.micro_batches=5"]),
]
TOLERANCE = 1e-9

_references: dict[tuple[str, ...], Trained] = {}


def one_process(tmp_path_factory, overrides: list[str]) -> Trained:
    """The run that the others are held against, trained once."""
    key = tuple(overrides)
    if key not in _references:
        folder = tmp_path_factory.mktemp("single") / "run"
        _references[key] = train(folder, [*overrides, "strategy=single", "trainer.micro_batch=4"])
    return _references[key]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("strategy", "cut"), CUTS)
def test_same_run_as_one_process(task, strategy, cut, tmp_path, tmp_path_factory):
    overrides = [*STABLE, *RAGGED, *TASKS[task], "trainer.steps=5"]
    reference = one_process(tmp_path_factory, overrides)
    assert max(reference.column("grad_norm")) > 0.1, "the clip must bite"
    run = train(tmp_path / "run", [*overrides, *strategy, *cut])
    assert difference(reference, run) < TOLERANCE
    for one, other in zip(*(evaluation(record) for record in (reference, run)), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)


RAGGED_EPOCHS = {
    # the last batch of each epoch has 9 rows: a rank of three has none of the fourth part
    "rows": [*STAND_INS["synthetic"][:2], "dataset.train_rows=100", "trainer.epochs=2", "trainer.global_batch=13"],
    # the last step of each epoch has shorter sequences
    "text": ["dataset=pydoc", "trainer.steps=24", "trainer.global_batch=52"],
}


@pytest.mark.parametrize(
    "strategy", [["strategy=ddp", "ranks=3"], [*PIPELINE, "ranks=2"], [*TENSOR, "ranks=2"]], ids=lambda s: s[0]
)
@pytest.mark.parametrize("task", RAGGED_EPOCHS)
def test_short_last_batches_weigh_right(task, strategy, tmp_path, tmp_path_factory):
    overrides = [*SMALL, *RAGGED[1:], *RAGGED_EPOCHS[task], "optimizer=sgd", "optimizer.lr=0.5", "scheduler=step"]
    overrides += ["scheduler.gamma=0.5", "trainer.eval_every=100"]  # once, after the last step
    one = one_process(tmp_path_factory, overrides)
    split = train(tmp_path / "split", [*overrides, *FOURS, *strategy])
    assert len(set(one.column("tokens"))) > 1, "some batch must be short"
    assert len(set(one.column("lr"))) == 2
    assert difference(one, split) < TOLERANCE
    for a, b in zip(evaluation(one), evaluation(split), strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)


LANGUAGE, CLASSES = STAND_INS["pydoc"], STAND_INS["synthetic"]


def test_a_run_of_nan_is_not_the_same_run(tmp_path):
    """A comparison by max() alone would pass it."""
    one = train(tmp_path / "run", [*STABLE, *STAND_INS["pydoc"], "trainer.steps=2"])
    lost = Trained([{**event, "loss": math.nan} for event in one.events], one.weights)
    assert difference(one, lost) == math.inf


def test_a_mesh_keeps_the_configs_timeout(tmp_path):
    assert run_ranks("faults:timeouts", (7.0,), 2, log_dir=tmp_path) == [7.0, 7.0]


SPLITS = [
    ["strategy=ddp", "ranks=2"],
    ["strategy=zero3", "ranks=2"],
    [*PIPELINE, "ranks=2"],
    [*TENSOR, "ranks=2"],
    [*HYBRID, "trainer.micro_batches=4"],
]


@pytest.mark.parametrize("strategy", SPLITS, ids=lambda s: s[0])
def test_fp32_stays_close_over_50_steps(strategy, tmp_path, tmp_path_factory):
    overrides = [*STABLE, "trainer.steps=50", "trainer.global_batch=13", "trainer.clip=0.5"]
    overrides += ["dataset=pydoc", "optimizer=sgd", "optimizer.lr=0.5"]
    one, other = one_process(tmp_path_factory, overrides), train(tmp_path / "run", [*overrides, *strategy])
    differences = [abs(a - b) / a for a, b in zip(one.column("loss"), other.column("loss"), strict=True)]
    assert differences[0] < 1e-5
    assert max(differences) < 1e-4


BITS = [
    [*PIPELINE, "ranks=2", *GPIPE],
    [*PIPELINE, "ranks=3"],
    ["strategy=pipeline_naive", "ranks=2"],
]


@pytest.mark.parametrize("strategy", BITS)
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_is_bit_identical_to_one_process(task, strategy, tmp_path, tmp_path_factory):
    """fp32, one thread a rank, the same cut: losses, norms, evaluations and weights."""
    overrides = [*STABLE, *TASKS[task], "trainer.global_batch=13", "trainer.clip=0.1"]
    one = one_process(tmp_path_factory, overrides)
    assert same_bits(one, train(tmp_path / "run", [*overrides, *strategy, *FOURS]))


def test_twenty_rows_in_eight_parts(tmp_path):
    """Parts of 3 and of 2 rows, as the pipeline tutorial's chunks=8 would have to cut its 20."""
    overrides = [*SMALL, *LANGUAGE, "trainer.steps=5", "trainer.eval_batches=2", "trainer.micro_batches=8"]
    one = train(tmp_path / "single", [*overrides, "strategy=single"])
    assert same_bits(one, train(tmp_path / "pipeline", [*overrides, *PIPELINE, "ranks=2"]))


def test_another_cut_is_not_bit_identical(tmp_path, tmp_path_factory):
    """The check above can fail."""
    overrides = [*STABLE, *LANGUAGE, "trainer.global_batch=13", "trainer.clip=0.1"]
    other = train(tmp_path / "run", [*overrides, *PIPELINE, "ranks=2", "trainer.micro_batches=3"])
    assert not same_bits(one_process(tmp_path_factory, overrides), other)


@pytest.mark.parametrize("strategy", [["strategy=ddp", "ranks=3"], [*TENSOR, "ranks=2"], HYBRID], ids=lambda s: s[0])
def test_same_config_twice_is_bit_identical(strategy, tmp_path):
    overrides = [*STABLE, "dataset=pydoc", "trainer.global_batch=13", "trainer.micro_batch=4", *strategy]
    assert identical(train(tmp_path / "first", overrides), train(tmp_path / "second", overrides))


def test_another_seed_is_another_run(tmp_path):
    """The check above can fail."""
    overrides = [*STABLE, "dataset=pydoc", "trainer.steps=2"]
    assert not identical(train(tmp_path / "a", overrides), train(tmp_path / "b", [*overrides, "seed=4"]))
