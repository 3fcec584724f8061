"""The run record: nothing written is lost, nothing torn is read, and a resumed run's past is void."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlab.errors import ShardlabError
from shardlab.tracking.mlflow_sink import where_to_look
from shardlab.tracking.record import EventLog, RunRecord, Tail, find_run, read_events
from shardlab.tracking.shipper import Shipper
from shardlab.tracking.store import Store


def write(path: Path, *events: dict[str, Any]) -> None:
    log = EventLog(path)
    for event in events:
        log.write(**event)
    log.close()


def kinds(path: Path) -> list[Any]:
    return [(event["event"], event.get("step")) for event in read_events(path)]


TORN = ["", "{", '{"event": "st', '{"event": "step", "time": 1.0, "step": 2}', "x" * 200_000]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_is_skipped_by_readers_and_cut_by_writers(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    write(path, {"event": "step", "step": 1})
    with path.open("a") as file:
        file.write(torn)
    assert kinds(path) == [("step", 1)]
    write(path, {"event": "end", "status": "FAILED"})
    assert kinds(path) == [("step", 1), ("end", None)]


@pytest.mark.parametrize("text", ["", '{"ev'])
def test_a_file_without_a_whole_line_has_no_events(tmp_path: Path, text: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    assert read_events(path) == read_events(tmp_path / "missing") == []
    write(path)
    assert path.read_text() == ""


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-320, -0.0, 2.0**53 + 2, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [float, np.float64])
def test_a_float_reads_back_bit_for_bit(tmp_path: Path, value: float, kind: type) -> None:
    write(tmp_path / "events.jsonl", {"event": "step", "loss": kind(value)})
    assert repr(read_events(tmp_path / "events.jsonl")[0]["loss"]) == repr(value)


def test_a_whole_line_that_is_no_event_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, {"event": "step", "step": 1})
    with path.open("a") as file:
        file.write("[1]\n")
    with pytest.raises(ShardlabError, match=r"events.jsonl line 2 "):
        read_events(path)


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, **values}


HOLDING = [
    # written                                                          what holds
    ([step(1), step(2), step(2)], [("step", 1), ("step", 2)]),
    ([step(1), step(2), {"event": "resume", "step": 1}, step(2)], [("step", 1), ("resume", 1), ("step", 2)]),
    ([step(1), step(2), {"event": "resume", "step": 0}], [("resume", 0)]),
    ([step(1), {"event": "end"}, {"event": "resume", "step": 1}], [("step", 1), ("resume", 1)]),
    (
        [{"event": "eval", "split": "val", "step": 1}, {"event": "eval", "split": "test", "step": 1}],
        [("eval", 1), ("eval", 1)],
    ),
    ([step(1), {"event": "pruned", "step": 1}, {"event": "resume", "step": 1}], [("step", 1), ("resume", 1)]),
    ([{"event": "rank", "rank": 0}, {"event": "rank", "rank": 1}], [("rank", None), ("rank", None)]),
]


@pytest.mark.parametrize(("written", "holding"), HOLDING)
def test_of_repeated_events_the_last_holds_and_a_resume_voids_what_came_later(
    tmp_path: Path, written: list[dict[str, Any]], holding: list[Any]
) -> None:
    write(tmp_path / "events.jsonl", *written)
    assert kinds(tmp_path / "events.jsonl") == holding


def test_of_two_events_at_one_step_the_later_values_hold(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", step(1, loss=5.0), step(1, loss=4.0))
    assert [event["loss"] for event in read_events(tmp_path / "events.jsonl")] == [4.0]


def test_a_tail_yields_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    seen = []
    for text in ["", '{"event": "a", "time"', ": 1}\n", "", '{"event": "b", "time": 2}\n{"event": "c", "time": 3}\n{']:
        with path.open("a") as file:
            file.write(text)
        seen.append([event["event"] for event in tail.events()])
    assert seen == [[], [], ["a"], [], ["b", "c"]]


def make_run(folder: Path, run: str, name: str, started: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text(json.dumps({"id": run, "name": name, "started": started}))
    (folder / "config.yaml").write_text("seed: 1\nmodel: {name: tiny}\n")
    return folder


def test_a_record_says_what_the_run_was(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "a1", "tiny-ddp2-s1")
    record = RunRecord.load(folder)
    assert (record.status, record.best, record.losses, record.tokens_per_s) == ("RUNNING", None, [], None)
    rates = [1, 1, 100, 300, 200]
    write(
        folder / "events.jsonl",
        {"event": "start", "total_steps": 5},
        *[step(n, loss=float(n), tokens=rate, seconds=1.0) for n, rate in enumerate(rates, 1)],
        {"event": "eval", "split": "val", "step": 5, "loss": 4.5},
        {"event": "best", "step": 5, "loss": 4.5},
        {"event": "rank", "rank": 0, "peak_memory": 7},
        {"event": "end", "status": "KILLED", "reason": "interrupted"},
    )
    write(folder / "rank-1.jsonl", {"event": "rank", "rank": 1, "peak_memory": 9})
    record = RunRecord.load(folder)
    assert (record.id, record.name, record.config["model"]) == ("a1", "tiny-ddp2-s1", {"name": "tiny"})
    assert (record.status, record.reason) == ("KILLED", "interrupted")
    assert record.losses == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert record.tokens_per_s == 200  # the first two steps pay for warming up
    assert record.best is not None
    assert record.best["loss"] == record.evals("val")[0]["loss"] == 4.5
    assert record.evals("test") == []
    assert record.peak_memory == {0: 7, 1: 9}
    assert record.start["total_steps"] == 5


def evaluation(step: int, split: str = "val", **values: float) -> dict[str, Any]:
    return {"event": "eval", "split": split, "step": step, **values}


VALUES = [
    # objective            evaluations                                           value
    ("val/loss", [{"loss": 3.0}, {"loss": 2.0}, {"loss": 2.5}], 2.0),
    ("val/accuracy", [{"accuracy": 0.25}, {"accuracy": 0.5}, {"accuracy": 0.0}], 0.5),
    ("val/perplexity", [{"perplexity": math.nan}, {"perplexity": math.inf}, {"perplexity": 9.0}], 9.0),
    ("val/loss", [{"loss": math.nan}], math.nan),
    ("val/f1", [{"loss": 1.0}], None),
    ("val/loss", [], None),
    ("train/loss", [], 6.0),
    ("perf/tokens_per_s", [], 200.0),
    ("perf/peak_memory", [], 9.0),
]


@pytest.mark.parametrize(("name", "evaluations", "value"), VALUES)
def test_an_objective_is_the_best_that_the_run_reached(
    tmp_path: Path, name: str, evaluations: list[dict[str, float]], value: float | None
) -> None:
    folder = make_run(tmp_path / "run", "a1", "tiny-single-s1")
    assert RunRecord.load(folder).value(name) is None
    rates = [1, 1, 100, 300, 200]
    write(
        folder / "events.jsonl",
        *[step(n, loss=7.0 - n / 5, tokens=rate, seconds=1.0) for n, rate in enumerate(rates, 1)],
        *[evaluation(step=n, **each) for n, each in enumerate(evaluations)],
        evaluation(step=9, split="test", loss=0.1, accuracy=0.9),  # the test split is not to choose by
        {"event": "rank", "rank": 0, "peak_memory": 9},
    )
    write(folder / "rank-1.jsonl", {"event": "rank", "rank": 1, "peak_memory": 7})
    assert repr(RunRecord.load(folder).value(name)) == repr(value)


def test_what_is_no_objective_has_no_value(tmp_path: Path) -> None:
    record = RunRecord.load(make_run(tmp_path / "run", "a1", "tiny-single-s1"))
    for name in ("test/loss", "val/los"):
        with pytest.raises(KeyError):
            record.value(name)


def test_a_run_that_a_sweeper_ended_early_says_at_which_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "a1", "tiny-single-s1")
    assert RunRecord.load(folder).pruned is None
    write(folder / "events.jsonl", step(3), {"event": "pruned", "step": 3}, {"event": "end", "status": "FINISHED"})
    assert RunRecord.load(folder).pruned == 3


def test_a_record_is_written_alone_only_while_nobody_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [EventLog(path), EventLog(path)]  # two share it: rank 0, and the launcher at the end
    for writer in writers:
        with pytest.raises(BlockingIOError):
            EventLog(path, alone=True)
        writer.close()
    EventLog(path, alone=True).close()


RUNS = [
    # asked for        found
    ("last", "runs/day/b"),
    ("runs/day/a", "runs/day/a"),
    ("abc111", "runs/day/a"),
    ("abc1", "runs/day/a"),
    ("base-single-s1", "runs/sweeps/0"),
    ("f00d", "runs/day/b"),  # MLflow's id
    ("tiny-single-s1", "2 runs in runs are called 'tiny-single-s1'; give an id or a folder, the latest first: abc222"),
    ("abc", "2 runs in runs are called 'abc'"),
    ("nothing", "no run 'nothing' in runs"),
]


@pytest.mark.parametrize(("text", "found"), RUNS)
def test_a_run_is_found_by_what_a_user_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/day/a"), "abc111", "tiny-single-s1", started=1)
    make_run(Path("runs/day/b"), "abc222", "tiny-single-s1", started=9)
    make_run(Path("runs/sweeps/0"), "ddd333", "base-single-s1", started=5)
    for name, theirs in {
        "provenance.json": '{"builder": {"id": "somebody else\'s"}}',  # at the root: it must not hide what is below
        "dvc/provenance.json": "[1]",
        "old/provenance.json": '{"id": "abc1", "name": "x", "started": "yesterday"}',
    }.items():
        (Path("runs") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("runs") / name).write_text(theirs)
    link = {"uri": "u", "experiment": "e", "experiment_id": "1", "run_id": "f00dcafe"}
    Path("runs/day/b/mlflow.json").write_text(json.dumps(link))
    Path("runs/torn").mkdir()
    Path("runs/torn/provenance.json").write_text("{")
    if found.startswith("runs"):
        assert find_run(text) == Path(found)
    else:
        with pytest.raises(ShardlabError) as refusal:
            find_run(text)
        assert str(refusal.value).startswith(found)


def test_without_any_run_the_error_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShardlabError, match="holds no runs"):
        find_run("last")


@pytest.mark.parametrize("text", ["", "x", "{}", "[]", '{"uri": 1, "experiment": "e", "run_id": "r"}'])
def test_a_damaged_link_to_mlflow_is_none(tmp_path: Path, text: str) -> None:
    """It was a traceback of `shardlab sync`, which can find or make the run anew."""
    folder = make_run(tmp_path / "run", "a1", "tiny-single-s1")
    (folder / "config.yaml").write_text("tracking: {uri: 'sqlite:////else/mlflow.db', experiment: mine}\n")
    (folder / "mlflow.json").write_text(text)
    assert where_to_look(folder) is None
    assert Shipper(folder).store == Store("sqlite:////else/mlflow.db", "mine")
