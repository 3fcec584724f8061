"""Whether a launcher lives, and the end that is written for one that doesn't. Nobody is started or killed here."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from shardlab.errors import ShardlabError
from shardlab.tracking import sweep_parent
from shardlab.tracking.points import launcher_of, launcher_tags
from shardlab.tracking.provenance import launcher, lives
from shardlab.tracking.record import EventLog, RunRecord, read_events
from shardlab.tracking.settle import REASON, settle_run
from shardlab.tracking.sweep_parent import begin_sweep, end_sweep, read_sweep, settle_sweep

NO_PROCESS = 2**22 + 5
"""More than Linux gives."""

LIVING: list[tuple[dict[str, Any], bool | None]] = [
    # what differs from this process               lives
    ({}, True),
    ({"pid_started": None}, True),  # of a run of an earlier version
    ({"pid": NO_PROCESS}, False),
    ({"pid_started": 1}, False),  # the id has become another process's
    ({"boot_id": "before"}, False),
    ({"host": "elsewhere"}, None),
    ({"host": "elsewhere", "pid": NO_PROCESS}, None),
    ({"pid_namespace": "pid:[1]", "pid": NO_PROCESS}, None),  # of a container that has this host's name
    ({"boot_id": ""}, None),
    ({"pid": "x"}, None),
]


@pytest.mark.parametrize(("differing", "living"), LIVING)
def test_a_process_is_dead_only_if_this_machine_can_know(differing: dict[str, Any], living: bool | None) -> None:
    process = {**launcher(), **differing}
    assert lives(process) is living
    assert lives(launcher_of(launcher_tags(process))) is living
    assert lives({}) is None


def test_a_process_of_another_user_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert lives(launcher()) is True
    monkeypatch.setattr("shardlab.tracking.provenance._process_fields", lambda pid: [])  # and is hidden
    assert lives(launcher()) is True


def test_a_process_that_has_ended_unnoticed_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    me = launcher()
    fields = ["Z", *["0"] * 18, str(me["pid_started"])]
    monkeypatch.setattr("shardlab.tracking.provenance._process_fields", lambda pid: fields)
    assert lives(me) is False


DEAD = {"pid": NO_PROCESS}


def left(folder: Path, *events: dict[str, Any], **differing: Any) -> Path:
    """A run that nobody has ended."""
    folder.mkdir(parents=True)
    about = {"id": "a1", "name": "tiny-single-s1", "started": 100.0, **launcher(), **differing}
    (folder / "provenance.json").write_text(json.dumps(about))
    (folder / "config.yaml").write_text("seed: 1\n")
    if events:
        log = EventLog(folder / "events.jsonl")
        for event in events:
            log.write(**event)
        log.close()
    return folder


STEP: dict[str, Any] = {"event": "step", "step": 1, "time": 130.0}


@pytest.mark.parametrize(("events", "ended"), [([STEP], 130.0), ([], 100.0)])
def test_a_run_of_a_dead_launcher_is_killed_at_its_last_sign_of_life(
    tmp_path: Path, events: list[dict[str, Any]], ended: float
) -> None:
    folder = left(tmp_path / "run", *events, **DEAD)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "torn')
    assert settle_run(folder)
    record = RunRecord.load(folder)
    assert (record.status, record.reason) == ("KILLED", REASON)
    assert (record.events[-1]["time"], record.events[-1]["seconds"]) == (ended, ended - 100)
    assert not settle_run(folder)
    assert len(read_events(folder / "events.jsonl")) == len(events) + 1


LEFT_ALONE: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([STEP], {}),
    ([STEP], {**DEAD, "host": "elsewhere"}),
    ([STEP, {"event": "end", "status": "FAILED"}], DEAD),
]


@pytest.mark.parametrize(("events", "differing"), LEFT_ALONE)
def test_a_run_that_lives_or_has_an_end_or_is_anothers_is_left_alone(
    tmp_path: Path, events: list[dict[str, Any]], differing: dict[str, Any]
) -> None:
    folder = left(tmp_path / "run", *events, **differing)
    before = (folder / "events.jsonl").read_bytes()
    assert not settle_run(folder)
    assert (folder / "events.jsonl").read_bytes() == before


def test_a_record_that_is_still_written_is_left_alone(tmp_path: Path) -> None:
    folder = left(tmp_path / "run", STEP, **DEAD)
    rank = EventLog(folder / "events.jsonl")
    assert not settle_run(folder)
    rank.write("step", step=2)
    rank.close()
    assert [event["event"] for event in read_events(folder / "events.jsonl")] == ["step", "step"]
    assert settle_run(folder)


def test_of_several_that_settle_a_run_at_once_one_does(tmp_path: Path) -> None:
    for attempt in range(20):
        folder = left(tmp_path / str(attempt), STEP, **DEAD)
        together, settled = threading.Barrier(4), []

        def settle(folder: Path = folder, together: Any = together, settled: Any = settled) -> None:
            together.wait()
            settled.append(settle_run(folder))

        threads = [threading.Thread(target=settle) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(settled) == [False, False, False, True]
        assert (folder / "events.jsonl").read_text().count('"end"') == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_folder_that_holds_no_run_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "provenance.json").write_text(text)
    assert not settle_run(tmp_path)
    assert not (tmp_path / "events.jsonl").exists()


ABOUT = {"id": "abc", "command": ["shardlab"], "space": ["seed=1,2"]}


def as_another_process(monkeypatch: pytest.MonkeyPatch, **differing: Any) -> None:
    """From now on this is not the process that it was."""
    monkeypatch.setattr(sweep_parent, "launcher", lambda: {**launcher(), **differing})


def test_a_sweep_is_written_down_once_and_resumed_after_its_end(tmp_path: Path) -> None:
    begin_sweep(tmp_path, ABOUT)
    first = (tmp_path / "sweep.json").read_bytes()
    begin_sweep(tmp_path, ABOUT)  # its second job
    assert (tmp_path / "sweep.json").read_bytes() == first
    end_sweep(tmp_path, "FAILED", {"sweep/jobs_failed": 1.0}, {"shardlab.best_job": "0"})
    assert read_sweep(tmp_path)["status"] == "FAILED"
    begin_sweep(tmp_path, ABOUT)
    about = read_sweep(tmp_path)
    assert not {"status", "ended", "metrics", "tags"} & about.keys()
    assert (about["space"], about["folder"], about["launcher"]) == (["seed=1,2"], str(tmp_path), launcher())
    assert about["started"] == json.loads(first)["started"]


def test_a_sweep_that_another_process_runs_is_refused_until_that_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_sweep(tmp_path, ABOUT)
    as_another_process(monkeypatch, pid=NO_PROCESS)
    with pytest.raises(ShardlabError, match=rf"process {os.getpid()} still runs this sweep"):
        begin_sweep(tmp_path, ABOUT)
    assert not settle_sweep(tmp_path, 1.0)
    end_sweep(tmp_path, "KILLED", {})
    begin_sweep(tmp_path, ABOUT)  # now by a process that is dead
    monkeypatch.undo()
    assert settle_sweep(tmp_path, 140.0)
    assert not settle_sweep(tmp_path, 150.0)
    assert (read_sweep(tmp_path)["status"], read_sweep(tmp_path)["ended"]) == ("KILLED", 140.0)
    begin_sweep(tmp_path, ABOUT)
    assert read_sweep(tmp_path)["launcher"] == launcher()


def test_a_sweep_of_another_id_is_refused(tmp_path: Path) -> None:
    begin_sweep(tmp_path, ABOUT)
    with pytest.raises(ShardlabError, match="holds another sweep"):
        begin_sweep(tmp_path, {**ABOUT, "id": "def"})
