"""One config, one run: data parallel ranks and every cut of the step train the same numbers as one process."""

from __future__ import annotations

import math
import os

import pytest
from faults import FAULTS
from trained import Trained, difference, identical, train

from shardlab.launch.ranks import run_ranks

# A small size keeps the suite short: what could differ is not in the size.
SMALL = ["seed=3", "model=tiny", "model.n_layers=2", "model.d_model=16", "model.d_ff=32", "model.dropout=0.2"]
STABLE = [*SMALL, "trainer.steps=20", "trainer.eval_batches=2"]
RAGGED = ["trainer.global_batch=13", "trainer.clip=0.1", "precision=fp64"]
TASKS = {
    "pydoc": ["dataset=pydoc", "optimizer=sgd", "optimizer.lr=0.5", "optimizer.kwargs.momentum=0.9"],
    "synthetic": ["dataset=synthetic", "dataset.task=classifier", "optimizer=adamw", "optimizer.lr=1e-3"],
    "wikitext2": [
        "dataset=wikitext2",
        "dataset.seq_len=16",
        "optimizer=sgd",
        "optimizer.lr=0.5",
        "optimizer.kwargs.momentum=0.9",
    ],
    "nsmc": ["dataset=nsmc", "optimizer=adamw", "optimizer.lr=1e-3"],
}
CUTS = [
    # strategy, how the step is cut
    (["strategy=ddp", "ranks=2"], ["trainer.micro_batch=4"]),
    (["strategy=ddp", "ranks=3"], ["trainer.micro_batch=4"]),
    (["strategy=ddp", "ranks=3"], []),
    (["strategy=single"], ["trainer.micro_batches=1"]),
    (["strategy=single"], ["trainer.micro_batches=3"]),
    (["strategy=single"], ["trainer.micro_batches=13"]),
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


def need_data(task: str) -> None:
    if task in ("wikitext2", "nsmc") and "SHARDLAB_DATA" not in os.environ:
        pytest.skip(f"{task} is not here: SHARDLAB_DATA is not set")


def evaluation(record: Trained) -> list[dict]:
    """The numbers of each evaluation."""
    return [
        {key: value for key, value in event.items() if not isinstance(value, str)}
        for event in record.events
        if event["event"] == "eval"
    ]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("strategy", "cut"), CUTS)
def test_same_run_as_one_process(task, strategy, cut, tmp_path, tmp_path_factory):
    need_data(task)
    overrides = [*STABLE, *RAGGED, *TASKS[task]]
    reference = one_process(tmp_path_factory, overrides)
    assert max(reference.column("grad_norm")) > 0.1, "the clip must bite"
    run = train(tmp_path / "run", [*overrides, *strategy, *cut])
    assert difference(reference, run) < TOLERANCE
    for one, other in zip(*(evaluation(record) for record in (reference, run)), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)


RAGGED_EPOCHS = {
    # the last batch of each epoch has 9 rows: a rank of three has none of the fourth part
    "rows": [*TASKS["synthetic"][:2], "dataset.train_rows=100", "trainer.epochs=2", "trainer.global_batch=13"],
    # the last step of each epoch has shorter sequences
    "text": ["dataset=pydoc", "trainer.steps=24", "trainer.global_batch=52"],
}


@pytest.mark.parametrize("task", RAGGED_EPOCHS)
def test_short_last_batches_weigh_right(task, tmp_path):
    overrides = [*SMALL, *RAGGED[1:], *RAGGED_EPOCHS[task], "optimizer=sgd", "optimizer.lr=0.5", "scheduler=step"]
    overrides += ["scheduler.gamma=0.5", "trainer.micro_batch=4"]
    one = train(tmp_path / "single", [*overrides, "strategy=single"])
    three = train(tmp_path / "ddp", [*overrides, "strategy=ddp", "ranks=3"])
    assert len(set(one.column("tokens"))) > 1, "some batch must be short"
    assert len(set(one.column("lr"))) == 2
    assert difference(one, three) < TOLERANCE
    for a, b in zip(evaluation(one), evaluation(three), strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("task", ["pydoc", "synthetic"])
def test_a_planted_fault_is_caught(fault, task, tmp_path, tmp_path_factory):
    overrides = [*STABLE, *RAGGED, *TASKS[task]]
    reference = one_process(tmp_path_factory, overrides)
    broken = train(tmp_path / "run", [*overrides, "strategy=ddp", "ranks=2", "trainer.micro_batch=4"], fault)
    assert difference(reference, broken) > 1e6 * TOLERANCE


def test_a_run_of_nan_is_not_the_same_run(tmp_path):
    """A comparison by max() alone would pass it."""
    one = train(tmp_path / "run", [*STABLE, *TASKS["pydoc"], "trainer.steps=2"])
    lost = Trained([{**event, "loss": math.nan} for event in one.events], one.weights)
    assert difference(one, lost) == math.inf


def test_a_mesh_keeps_the_configs_timeout(tmp_path):
    assert run_ranks("faults:timeouts", (7.0,), 2, log_dir=tmp_path) == [7.0, 7.0]


def test_fp32_stays_close_over_50_steps(tmp_path):
    overrides = [*STABLE, "trainer.steps=50", "trainer.global_batch=13", "trainer.clip=0.5"]
    overrides += ["dataset=pydoc", "optimizer=sgd", "optimizer.lr=0.5"]
    one = train(tmp_path / "single", [*overrides, "strategy=single"])
    other = train(tmp_path / "ddp", [*overrides, "strategy=ddp", "ranks=2"])
    differences = [abs(a - b) / a for a, b in zip(one.column("loss"), other.column("loss"), strict=True)]
    assert differences[0] < 1e-5
    assert max(differences) < 1e-4


@pytest.mark.parametrize("strategy", [["strategy=single"], ["strategy=ddp", "ranks=3"]])
def test_same_config_twice_is_bit_identical(strategy, tmp_path):
    overrides = [*STABLE, "dataset=pydoc", "trainer.global_batch=13", "trainer.micro_batch=4", *strategy]
    assert identical(train(tmp_path / "first", overrides), train(tmp_path / "second", overrides))


def test_another_seed_is_another_run(tmp_path):
    """The check above can fail."""
    overrides = [*STABLE, "dataset=pydoc", "trainer.steps=2"]
    assert not identical(train(tmp_path / "a", overrides), train(tmp_path / "b", [*overrides, "seed=4"]))
