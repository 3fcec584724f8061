"""`shardlab parity`: the splits of one config side by side, judged; real ranks, tiny models."""

from pathlib import Path

import pytest

from shardlab.cli import main

SMALL = ["dataset=synthetic", "model.n_layers=1", "model.d_model=16", "model.d_ff=32", "trainer.steps=2"]


def rows(text: str) -> list[list[str]]:
    """The cells of the table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_splits_of_one_config_are_the_same(capfd):
    assert main(["parity", *SMALL, "precision=fp64", "strategy=single,ddp", "run_dir=kept"]) == 0
    shown = capfd.readouterr().out
    reference, other = rows(shown)
    assert (reference[0], reference[-1]) == ("strategy=single", "reference")
    assert (other[0], other[1], other[-1]) == ("strategy=ddp", "2", "same")
    assert all(float(cell) < 1e-9 for cell in other[2:-1])
    assert shown.splitlines()[-1].startswith("same; largest difference ")
    assert sorted(path.name for path in Path("kept").iterdir()) == ["0", "1"]
    assert main(["parity", *SMALL, "strategy=single,ddp", "run_dir=kept"]) == 2


def test_one_value_is_held_against_one_process_and_a_refused_one_is_a_row(capfd):
    words = ["parity", *SMALL, "strategy=tensor", "strategy.tensor=2,3", "precision=fp64"]
    assert main(words) == 1
    shown = capfd.readouterr().out
    assert [(row[0], row[-1]) for row in rows(shown)] == [
        ("strategy=single", "reference"),
        ("strategy.tensor=2", "same"),
        ("strategy.tensor=3", "refused"),
    ]
    assert "not the same: strategy.tensor=3: " in shown.splitlines()[-1]


def test_runs_that_are_to_train_something_else_have_a_reference_of_their_own(capfd):
    assert main(["parity", *SMALL, "strategy=single", "seed=1,2", "trainer.micro_batch=5,20", "precision=fp64"]) == 0
    assert [row[-1] for row in rows(capfd.readouterr().out)] == ["reference", "same", "reference", "same"]


def test_a_difference_beyond_the_bound_is_named(capfd, monkeypatch):
    """fp32's rounding, held against a bound that no rounding keeps."""
    from shardlab.analysis.same import BOUNDS

    monkeypatch.setitem(BOUNDS, "fp32", BOUNDS["fp64"])
    assert main(["parity", *SMALL, "strategy=tensor"]) == 1
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("not the same: strategy=tensor: ")
    assert "more than 1e-09; largest difference " in last


def test_a_rank_that_fails_is_a_row(capfd):
    """The learning rate is no number that a run survives."""
    assert main(["parity", *SMALL, "strategy=single,ddp", "optimizer=sgd", "optimizer.lr=1e30", "trainer.steps=4"]) == 1
    assert "not the same: " in capfd.readouterr().out.splitlines()[-1]


WRONG = [
    (["strategy=single,ddp", "trainer.stepz=3"], "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    (["strategy=ddp,single", "ranks=99"], "strategy.replicate=99 exceeds the 20 rows"),
    (["strategy=single"], "strategy=single is compared with nothing; name a second one: strategy=single,ddp"),
    (["strategy=single,ddp", "optimizer.lr=interval(0,1)"], "is an interval"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_a_wrong_config_is_one_line_and_starts_nothing(words, says, capfd):
    assert main(["parity", *SMALL, *words]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
