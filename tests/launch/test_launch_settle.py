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
from launch_parts import composed, job_of, stand_in, sweep_of
from launch_processes import LIGHT, Launcher, wait_until

from shardlab.launch import run as run_module
from shardlab.launch.run import run
from shardlab.tracking import mlflow_sink, provenance, settle, sweep_parent
from shardlab.tracking.mlflow_sink import sync
from shardlab.tracking.provenance import launcher
from shardlab.tracking.record import EventLog, RunRecord
from shardlab.tracking.store import Store, open_store

NO_PROCESS = 2**22 + 5
"""More than Linux gives."""

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
    monkeypatch.setattr(settle, "SETTLE_SECONDS", 150)
    monkeypatch.setattr(settle, "_settled", set())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db", "e")
    open_store(store)
    return store


@contextlib.contextmanager
def running(store: Store, name: str) -> Iterator[Launcher]:
    """A launcher in the middle of a run that never ends by itself, and that MLflow shows."""
    launcher = Launcher(LIGHT + CODE, Path.cwd(), store.uri, name, "wait")
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
    with running(store, "killed") as process:
        assert shown(store, "killed").info.status == shown(store, "sweep killed").info.status == "RUNNING"
        kill(process)
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
    with running(store, "living") as process:
        next_command(store)
        assert process.process.poll() is None
        assert RunRecord.load(Path("living/0")).status == "RUNNING"
        assert shown(store, "living").info.status == shown(store, "sweep living").info.status == "RUNNING"


def abandoned(store: Store, name: str, monkeypatch: pytest.MonkeyPatch, **differing: Any) -> None:
    """A sweep with one run, just as a launcher that is dead now would have left them. differing: its facts."""
    dead = {**launcher(), "pid": NO_PROCESS, **differing}
    words = ["tracking=mlflow", f"tracking.uri={store.uri}", "tracking.experiment=e", f"tracking.run_name={name}"]
    shipped, finish = threading.Event(), mlflow_sink.Sink.finish

    def ship_and_go(sink: mlflow_sink.Sink, give_up: object) -> str | None:
        """A record without an end is never whole: the sink would wait for the five minutes that a database gets."""
        shipped.clear()
        return finish(sink, shipped.is_set)

    with monkeypatch.context() as patch:
        for module in (provenance, sweep_parent):
            patch.setattr(module, "launcher", lambda: dead)
        patch.setattr(run_module, "end", lambda *_: None)
        patch.setattr(mlflow_sink, "settle_once", lambda _: shipped.set())  # it comes after each shipment
        patch.setattr(mlflow_sink.Sink, "finish", ship_and_go)
        run(composed("none", *words, f"run_dir={name}/0"), job=job_of(sweep_of(name), 0))
    assert RunRecord.load(Path(name, "0")).status == "RUNNING"
    assert shown(store, name).info.status == shown(store, f"sweep {name}").info.status == "RUNNING"


LEFT = [
    # what has become of it    status in MLflow afterwards
    ("elsewhere", "RUNNING"),
    ("living, gone", "RUNNING"),  # whose folder this command can't see
    ("gone", "KILLED"),
    ("another's", "KILLED"),
    ("torn", "KILLED"),
    ("unreadable", "KILLED"),
]


def test_what_cannot_be_known_is_left_alone_and_a_run_without_a_record_is_settled_in_mlflow_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_other_processes = {"elsewhere": {"host": "elsewhere"}, "living, gone": launcher()}
    for what, _ in LEFT:
        abandoned(store, f"run {what[:4]}", monkeypatch, **of_other_processes.get(what, {}))
    shutil.rmtree("run gone")
    shutil.rmtree("run livi")
    for path in (Path("run anot/0/provenance.json"), Path("run anot/sweep.json")):
        path.write_text(json.dumps({**json.loads(path.read_text()), "id": "f00d"}))
    Path("run torn/0/events.jsonl").write_text("no event\n")
    Path("run unre/0/config.yaml").write_text("{no\n")
    next_command(store)
    for what, status in LEFT:
        for name in (f"run {what[:4]}", f"sweep run {what[:4]}"):
            assert (name, shown(store, name).info.status) == (name, status)
    assert RunRecord.load(Path("run else/0")).status == "RUNNING"
    assert shown(store, "run gone").data.tags["shardlab.reason"] == "its launcher was killed"


def test_two_commands_at_once_ship_an_end_that_was_written_and_not_shipped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(store, "ended", monkeypatch)
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


def test_syncing_a_run_of_a_killed_launcher_settles_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned(store, "synced", monkeypatch)
    sync(Path("synced/0"))
    assert RunRecord.load(Path("synced/0")).status == shown(store, "synced").info.status == "KILLED"
