"""`shardlab plan` as a user calls it: quick, plain, and wrong in one line."""

import os

import pytest


def test_a_plan_takes_less_than_three_seconds_and_leaves_nothing_behind(shardlab, tmp_path):
    shardlab("plan")  # the tokens are there
    before = os.times()
    done = shardlab("plan", "model=small", "strategy=hybrid", "ranks=4", "plan.memory_gib=1")
    after = os.times()
    assert (done.returncode, done.stderr) == (0, "")
    # Seconds of its own, not of a clock: other tests may run beside it.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3
    for part in ("Memory of a rank", "Sent by a rank in a step", "Schedule 1f1b: ideal bubble 9.1%", "fits, "):
        assert part in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_first_plan_of_a_dataset_says_that_it_prepares_it(shardlab, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    words = ("plan", "dataset=synthetic", "dataset.train_tokens=20000")
    assert shardlab(*words).stderr == "preparing dataset synthetic, once\n"
    assert shardlab(*words).stderr == ""


WRONG = [
    (["strategy=tensor", "ranks=3"], "strategy.tensor=3 does not divide model.n_heads=4; 1, 2 or 4 would"),
    (["strategy=ddp,tensor"], "'strategy=ddp,tensor' holds several values; add -m to run each"),
    (["trainer.stepz=3"], "unknown key 'trainer.stepz'; did you mean 'trainer.steps'?"),
    (["plan.memory_gib=0"], "plan.memory_gib=0.0: it must be a number above 0"),
    (["--shape=3"], "shardlab plan: "),
]


@pytest.mark.parametrize(("words", "line"), WRONG, ids=str)
def test_a_wrong_config_is_one_line_and_status_2(shardlab, words, line):
    done = shardlab("plan", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_candidates_stand_side_by_side(shardlab):
    done = shardlab("plan", "-m", "strategy=single,ddp,zero3,pipeline,tensor", "ranks=3", "plan.memory_gib=0.02")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["single", "ddp", "zero3", "pipeline", "tensor"]
    assert lines[0].split()[-3:] == ["in", "0.02", "GiB"]
    assert "refused: strategy.tensor=3 does not divide" in lines[5]
    assert "fits, " in lines[4]
    assert "no, " in lines[1]


def test_candidates_that_are_all_refused_are_status_2(shardlab):
    done = shardlab("plan", "-m", "strategy=tensor", "ranks=3,5")
    assert done.returncode == 2
    assert done.stdout.count("refused: ") == 2
