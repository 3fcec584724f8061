"""A launcher that is killed leaves a run that seems to run; the next command writes the end that it has missed."""

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_parts import composed, stand_in
from launch_processes import Launcher, wait_until

from shardlab.launch import run as run_module
from shardlab.launch.run import run
from shardlab.tracking import settle
from shardlab.tracking.mlflow_sink import sync
from shardlab.tracking.record import EventLog, RunRecord
from shardlab.tracking.store import Store, open_store

CODE = """
import sys
from pathlib import Path
from launch_parts import composed, job_of, stand_in, sweep_of
from shardlab.launch import run as run_module
stand_in(run_module)
uri, folder, fault = sys.argv[1:]
sweep = sweep_of(folder, ["shardlab", "train"])
tracked = ["tracking=mlflow", f"tracking.uri={uri}", "tracking.experiment=e", f"tracking.run_name={folder}"]
run_module.run(composed(fault, *tracked, f"run_dir={folder}/0"), job=job_of(sweep, 0))
"""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAIN_RANK", "prepare"):
        monkeypatch.setattr(run_module, name, getattr(run_module, name))
    stand_in(run_module)
    monkeypatch.setattr(settle, "_settled", set())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db", "e")
    open_store(store)
    return store


@contextlib.contextmanager
def running(store: Store, name: str) -> Iterator[Launcher]:
    """A launcher in the middle of a run that never ends by itself, and that MLflow shows."""
    launcher = Launcher(CODE, Path.cwd(), store.uri, name, "wait")
    try:
        link, events = Path(name, "0", "mlflow.json"), Path(name, "0", "events.jsonl")
        assert wait_until(lambda: link.exists() and '"step": 2' in events.read_text(), 120), launcher.output
        yield launcher
    finally:
        launcher.kill()


def kill(launcher: Launcher) -> None:
    """SIGKILL to the launcher alone; its ranks follow by themselves."""
    os.kill(launcher.process.pid, signal.SIGKILL)
    launcher.process.wait()
    assert launcher.left_after(30) == []


def next_command(store: Store) -> None:
    words = ["tracking=mlflow", f"tracking.uri={store.uri}", "tracking.experiment=e", "tracking.run_name=next"]
    assert run(composed("none", *words)).status == "FINISHED"


def shown(store: Store, name: str) -> Any:
    client, experiment = open_store(store)
    [found] = client.search_runs([experiment], f"attributes.run_name = '{name}'")
    return found


def test_a_run_of_a_killed_launcher_is_settled_by_the_next_command(store: Store) -> None:
    with running(store, "killed") as launcher:
        assert shown(store, "killed").info.status == shown(store, "sweep killed").info.status == "RUNNING"
        kill(launcher)
    assert RunRecord.load(Path("killed/0")).status == "RUNNING"
    next_command(store)
    record = RunRecord.load(Path("killed/0"))
    assert (record.status, record.reason) == ("KILLED", "its launcher was killed")
    found = shown(store, "killed")
    assert (found.info.status, found.data.tags["shardlab.reason"]) == ("KILLED", "its launcher was killed")
    assert found.info.end_time == int(record.events[-1]["time"] * 1000)
    client, _ = open_store(store)
    assert [point.value for point in client.get_metric_history(found.info.run_id, "train/loss")] == record.losses
    assert "events.jsonl" in {file.path for file in client.list_artifacts(found.info.run_id)}
    assert shown(store, "sweep killed").info.status == "KILLED"
    assert json.loads(Path("killed/sweep.json").read_text())["status"] == "KILLED"


def test_a_run_that_lives_is_left_alone(store: Store) -> None:
    with running(store, "living") as launcher:
        next_command(store)
        assert launcher.process.poll() is None
        assert RunRecord.load(Path("living/0")).status == "RUNNING"
        assert shown(store, "living").info.status == shown(store, "sweep living").info.status == "RUNNING"


def test_a_run_of_another_machine_is_left_alone(store: Store) -> None:
    with running(store, "elsewhere") as launcher:
        kill(launcher)
    client, _ = open_store(store)
    for name in ("elsewhere", "sweep elsewhere"):
        client.set_tag(shown(store, name).info.run_id, "shardlab.host", "elsewhere")
    next_command(store)
    assert RunRecord.load(Path("elsewhere/0")).status == "RUNNING"
    assert shown(store, "elsewhere").info.status == shown(store, "sweep elsewhere").info.status == "RUNNING"


@pytest.mark.parametrize("loss", ["gone", "another's", "damaged"])
def test_a_run_without_a_record_is_settled_in_mlflow_alone(store: Store, loss: str) -> None:
    name = f"{loss[:4]} run"
    with running(store, name) as launcher:
        kill(launcher)
    if loss == "gone":
        shutil.rmtree(name)
    elif loss == "another's":
        for path in (Path(name, "0", "provenance.json"), Path(name, "sweep.json")):
            path.write_text(json.dumps({**json.loads(path.read_text()), "id": "f00d"}))
    else:
        Path(name, "0", "events.jsonl").write_text("no event\n")
    next_command(store)
    for each in (name, f"sweep {name}"):
        assert shown(store, each).info.status == "KILLED"
    assert shown(store, name).data.tags["shardlab.reason"] == "its launcher was killed"


def test_two_commands_at_once_ship_an_end_that_was_written_and_not_shipped(store: Store) -> None:
    with running(store, "ended") as launcher:
        kill(launcher)
    log = EventLog(Path("ended/0/events.jsonl"))
    log.write("end", status="FAILED", reason="rank 1 raised ValueError", seconds=1.0)
    log.close()
    client, experiment = open_store(store)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            settle.settle_store(client, experiment, store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = shown(store, "ended")
    assert (found.info.status, found.data.tags["shardlab.reason"]) == ("FAILED", "rank 1 raised ValueError")
    losses = [point.value for point in client.get_metric_history(found.info.run_id, "train/loss")]
    assert losses == RunRecord.load(Path("ended/0")).losses
    assert Path("ended/0/events.jsonl").read_text().count('"end"') == 1
    assert shown(store, "sweep ended").info.status == "KILLED"


def test_syncing_a_run_of_a_killed_launcher_settles_it(store: Store) -> None:
    with running(store, "synced") as launcher:
        kill(launcher)
    sync(Path("synced/0"))
    assert RunRecord.load(Path("synced/0")).status == shown(store, "synced").info.status == "KILLED"
