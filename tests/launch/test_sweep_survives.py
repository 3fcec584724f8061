"""A sweep whose jobs fail, whose launcher is killed, that is interrupted: what finished stays, the rest goes on.

The jobs of two tests are real trainings on real ranks; of the others, what the sweep sees of one: sweep_faults.py.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launch_processes import LIGHT, Launcher, wait_until
from sweep_faults import COUNT

CODE = """
import sys
from shardlab.cli import main
from shardlab.launch import run
run.TRAIN_RANK = "sweep_faults:train_rank"
sys.exit(main(["train", "-m", *sys.argv[1:]]))
"""
QUICK = LIGHT + CODE.replace("train_rank", "record_rank")

SHORT = (
    "dataset=synthetic",
    "dataset.train_tokens=3000",
    "trainer.steps=3",
    "trainer.eval_batches=1",
    "trainer.test=false",
    "runtime.device=cpu",
)


def sweep(*words: str, code: str = QUICK) -> Launcher:
    """Run the sweep to its end; the launcher's exit status is in `process.returncode`."""
    launcher = Launcher(code, Path(), *SHORT, *words)
    try:
        launcher.end(seconds=240)
        assert launcher.left_after(10) == [], launcher.output
    finally:
        launcher.kill()
    return launcher


def rows(folder: str = "all") -> dict[int, dict[str, Any]]:
    """The row of each job that holds."""
    lines = (Path(folder) / "jobs.jsonl").read_text().splitlines()
    return {row["number"]: row for row in map(json.loads, lines)}


def statuses(folder: str = "all") -> list[str]:
    found = rows(folder)
    return [found[number]["status"] for number in sorted(found)]


def trained() -> Counter[str]:
    """How many times the ranks of each seed began."""
    return Counter(Path(COUNT).read_text().split()) if Path(COUNT).exists() else Counter()


def shown_by_mlflow() -> tuple[Any, list[Any]]:
    """The parent run of the only sweep in mlflow.db of this folder, and its children by start."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('mlflow.db').absolute()}")  # by its uri it would know another folder's
    experiment = client.get_experiment_by_name("shardlab")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    return parents[0], [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]


def test_twelve_jobs_of_which_four_are_sabotaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exception, SIGKILL of a rank, endless loop, refused combination; two jobs at a time."""
    folder = Path("own/experiment")
    folder.mkdir(parents=True)
    jobs = {str(seed): ("ddp", 2, seed) for seed in (*range(8), 101, 102, 103)} | {"refused": ("tensor", 3, 9)}
    for name, (strategy, ranks, seed) in jobs.items():
        text = f"# @package _global_\ndefaults:\n  - override /strategy: {strategy}\nranks: {ranks}\nseed: {seed}\n"
        (folder / f"job_{name}.yaml").write_text(text)
    words = (
        *("--config-dir", "own", "experiment=glob(job_*)", "hydra.sweep.dir=all"),
        *("sweep.parallel=2", "runtime.timeout=15"),
    )
    first = sweep(*words, code=CODE)
    assert first.process.returncode == 1, first.output
    ended = {row["what"].removeprefix("experiment=job_"): row for row in rows().values()}
    assert len(ended) == 12
    assert all(ended[str(number)]["status"] == "finished" for number in range(8)), first.output
    reasons = {name: (row["status"], row["reason"]) for name, row in ended.items() if row["status"] != "finished"}
    assert set(reasons) == {"101", "102", "103", "refused"}
    assert reasons["101"] == ("failed", "rank 1 raised ValueError: the loss is made of cheese")
    assert reasons["102"] == ("failed", "rank 1 was killed by SIGKILL (out of memory?)")
    assert reasons["103"][0] == "failed"
    assert reasons["103"][1].startswith("rank 1 hangs"), reasons
    assert "sweep_faults.py" in reasons["103"][1]
    assert reasons["refused"][0] == "refused"
    assert "does not divide model.n_heads=4" in reasons["refused"][1]
    assert 'raise ValueError("the loss is made of cheese")' in first.output  # the traceback, when it happened
    parent, children = shown_by_mlflow()
    assert parent.info.status == "FAILED"
    assert Counter(child.info.status for child in children) == {"FINISHED": 8, "FAILED": 3}
    assert parent.data.metrics["sweep/jobs_finished"] == 8

    monkeypatch.setenv("SHARDLAB_TEST_MOOD", "mended")
    again = sweep(*words)  # the same jobs by a stand-in: which they are is what counts
    assert again.process.returncode == 1, again.output
    assert Counter(statuses()) == {"finished": 11, "refused": 1}
    assert trained() == Counter(map(str, range(8))) + Counter({"101": 2, "102": 2, "103": 2})
    assert shown_by_mlflow()[0].info.status == "FINISHED"
    assert len((Path("all") / "sweep.csv").read_text().splitlines()) == 13


def test_what_finished_before_the_launcher_was_killed_is_shown_by_mlflow() -> None:
    """Jobs don't wait for MLflow, whose import alone takes longer than these: the same command ships them, and ends
    the sweep though it runs nothing."""
    words = ("seed=1,2,3", "hydra.sweep.dir=all")
    launcher = Launcher(QUICK, Path(), *SHORT, *words)
    wait_until(lambda: Path("all/jobs.jsonl").exists() and statuses().count("finished") == 3, 120)
    os.kill(launcher.process.pid, signal.SIGKILL)
    launcher.kill()
    again = sweep(*words)
    assert again.process.returncode == 0, again.output
    assert again.output.count("finished by an earlier call") == 3
    parent, children = shown_by_mlflow()
    assert [parent.info.status, *(child.info.status for child in children)] == ["FINISHED"] * 4
    assert parent.data.metrics["sweep/jobs_finished"] == 3
    assert len(Path("all/sweep.csv").read_text().splitlines()) == 4
    assert json.loads(Path("all/sweep.json").read_text())["status"] == "FINISHED"


def test_two_jobs_of_one_subfolder_get_two_folders() -> None:
    words = ("seed=1,2", "hydra.sweep.subdir=x", "sweep.parallel=2", "hydra.sweep.dir=all", "tracking=none")
    ended = sweep(*words)
    assert ended.process.returncode == 0, ended.output
    assert sorted(path.name for path in Path("all").iterdir() if path.is_dir()) == ["x", "x-2"]


def test_the_launcher_killed_at_five_moments_loses_and_repeats_nothing() -> None:
    words = ("seed=range(8)", "sweep.parallel=2", "trainer.steps=20")
    moments = random.Random(4)
    finished: set[int] = set()
    for _ in range(5):
        launcher = Launcher(QUICK, Path(), *SHORT, *words)
        folder = Path("runs/sweeps")
        wait_until(lambda: bool(list(folder.glob("*/*/jobs.jsonl"))) or launcher.process.poll() is not None)  # noqa: B023
        time.sleep(moments.uniform(0.0, 3.0))
        os.kill(launcher.process.pid, signal.SIGKILL)
        assert launcher.left_after(60) == []  # a fork server that was importing torch ends when it has
        launcher.kill()
        sweeps = list(folder.glob("*/*"))
        assert len(sweeps) == 1
        now = {number for number, row in rows(str(sweeps[0])).items() if row["status"] == "finished"}
        assert now >= finished
        finished = now
    ended = sweep(*words)
    assert ended.process.returncode == 0, ended.output
    (only,) = folder.glob("*/*")
    assert statuses(str(only)) == ["finished"] * 8
    records = Counter(
        json.loads((path.parent / "provenance.json").read_text())["overrides"][-1]
        for path in only.glob("*/events.jsonl")
        if '"status": "FINISHED"' in path.read_text()
    )
    assert sum(records.values()) == 8, records
    parent, children = shown_by_mlflow()
    assert parent.info.status == "FINISHED"
    assert {child.info.status for child in children} <= {"FINISHED", "KILLED"}
    assert sum(child.info.status == "FINISHED" for child in children) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_job_and_the_same_command_goes_on(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("seed=1,2,3", "sweep.parallel=2", "trainer.steps=20", "hydra.sweep.dir=all")
    monkeypatch.setenv("SHARDLAB_TEST_MOOD", "slow")
    launcher = Launcher(QUICK, Path(), *SHORT, *words)
    wait_until(lambda: sum(trained().values()) == 2, 120)
    os.kill(launcher.process.pid, number)
    assert launcher.end(60) == 128 + number, launcher.output
    assert launcher.left_after(10) == []
    assert statuses() == ["killed", "killed"]
    assert "the same command goes on from here" in launcher.output
    parent, children = shown_by_mlflow()
    assert [parent.info.status, *(child.info.status for child in children)] == ["KILLED"] * 3
    monkeypatch.setenv("SHARDLAB_TEST_MOOD", "mended")
    again = sweep(*words)
    assert again.process.returncode == 0, again.output
    assert statuses() == ["finished"] * 3


def test_fail_fast_ends_the_sweep_at_the_first_failure() -> None:
    ended = sweep("seed=101,1,2,3,4", "strategy=ddp", "sweep.fail_fast=true", "hydra.sweep.dir=all", "tracking=none")
    assert ended.process.returncode == 1, ended.output
    assert statuses() == ["failed"]
    assert [path.name for path in Path("all").iterdir() if path.is_dir()] == ["0"]
    assert "the sweep ends: job 0 failed, and sweep.fail_fast=true" in ended.output


def test_exit_in_a_job_is_a_failure_and_an_objective_of_nan_is_one() -> None:
    ended = sweep(
        *("seed=104,1", "strategy=ddp", "hydra.sweep.dir=all", "tracking=none"),
        *("optimizer=sgd", "optimizer.lr=0.1,1e30", "trainer.steps=4", "trainer.on_nonfinite=skip"),
    )
    assert ended.process.returncode == 1
    shown = {row["what"]: (row["status"], row["reason"]) for row in rows().values()}
    assert shown["seed=1 optimizer.lr=0.1"][0] == "finished"
    assert shown["seed=1 optimizer.lr=1e+30"] == ("failed", "val/loss is nan")
    assert shown["seed=104 optimizer.lr=0.1"] == ("failed", "rank 1 raised RuntimeError: exit was called with 0")


def test_three_sweeps_at_once_on_a_fresh_store() -> None:
    """Each takes a folder of its own, and the store that all of them make loses nothing."""
    uri = f"sqlite:///{Path('mlflow.db').absolute()}"
    launchers = [Launcher(QUICK, _folder(str(n)), *SHORT, "seed=1,2", f"tracking.uri={uri}") for n in range(3)]
    try:
        assert [launcher.end(300) for launcher in launchers] == [0] * 3, [each.output for each in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    for launcher in launchers:
        assert "warning" not in launcher.output
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("shardlab")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 9
    assert {run.info.status for run in runs} == {"FINISHED"}
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(children) == 6
    assert all(len(client.get_metric_history(run.info.run_id, "train/loss")) == 3 for run in children)


def _folder(name: str) -> Path:
    Path(name).mkdir()
    return Path(name)


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_other_launchers_run_the_same_jobs(launcher: str) -> None:
    """The job that fails does so by its loss: these jobs' ranks may come from another process."""
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    words = (
        *("optimizer=sgd", "optimizer.lr=0.1,1e30,0.2", "strategy=ddp", "trainer.steps=4"),
        *(f"hydra/launcher={launcher}", "hydra.sweep.dir=all", "tracking=none"),
    )
    code = CODE if launcher == "joblib" else QUICK
    ended = sweep(*words, code=code)
    assert ended.process.returncode == 1, ended.output
    assert statuses() == ["finished", "failed", "finished"]
    again = sweep(*words, code=code)
    assert again.process.returncode == 1
    assert statuses() == ["finished", "failed", "finished"]
    assert sorted(path.parent.name for path in Path("all").glob("*/events.jsonl")) == ["0", "1", "1-2", "2"]
