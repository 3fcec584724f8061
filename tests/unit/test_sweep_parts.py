"""The parts of a sweep, each alone: slots, rows, books, identity, objectives, and what is shown."""

import csv
import fcntl
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.config.compose import compose
from shardlab.config.objectives import check_objective, names_of
from shardlab.errors import ShardlabError
from shardlab.sweeps import slots as slots_module
from shardlab.sweeps.books import LOCK, Sweep, SweepRunsError, about_sweep, earlier_sweeps, space_of
from shardlab.sweeps.jobs import free_folder
from shardlab.sweeps.live import Lines, LiveTable
from shardlab.sweeps.outcome import of_record
from shardlab.sweeps.rows import CSV, Row, Rows, best_rows, table, write_csv
from shardlab.sweeps.slots import Pool, Slot, slots
from shardlab.tracking.record import EventLog, RunRecord

SAME = [
    ["run_dir=elsewhere"],
    ["tracking=none"],
    ["tracking.uri=http://x"],
    ["runtime.timeout=5"],
    ["sweep.parallel=2", "sweep.fail_fast=true", "sweep.objective=train/loss"],
]
OTHER = [
    ["seed=2"],
    ["optimizer.lr=0.3"],
    ["strategy=ddp"],
    ["ranks=4"],
    ["runtime.threads=1"],
    ["precision=fp64"],
    ["optimizer.kwargs.eps=1e-5"],
]


@pytest.mark.parametrize("overrides", SAME)
def test_where_a_run_is_kept_and_how_it_is_watched_does_not_make_it_another(overrides: list[str]) -> None:
    assert compose(overrides).hash == compose([]).hash


def test_whatever_else_differs_makes_another_run() -> None:
    hashes = [compose(overrides).hash for overrides in [[], *OTHER]]
    assert len(set(hashes)) == len(hashes)


PARTS = [
    # cores        GPUs                  parallel  cores of each             GPUs of each
    ([0, 1],       (),                   1,        [(0, 1)],                 [()]),
    ([0, 1],       (),                   2,        [(0,), (1,)],             [(), ()]),
    ([2, 3, 5, 7, 9], (),                2,        [(2, 3), (5, 7)],         [(), ()]),
    ([0, 1, 2, 3], ("0", "1", "2", "3"), 2,        [(0, 1), (2, 3)],         [("0", "1"), ("2", "3")]),
    ([0, 1, 2, 3], ("4", "GPU-b"),       2,        [(0, 1), (2, 3)],         [("4",), ("GPU-b",)]),
    ([0, 1, 2],    ("0",),               3,        [(0,), (1,), (2,)],       [(), (), ()]),
]  # fmt: skip


@pytest.mark.parametrize(("cores", "gpus", "parallel", "each_cores", "each_gpus"), PARTS)
def test_the_machine_is_dealt_out_in_disjoint_parts(
    cores: list[int],
    gpus: tuple[str, ...],
    parallel: int,
    each_cores: list[tuple[int, ...]],
    each_gpus: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots_module.os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(slots_module, "gpu_names", lambda: gpus)
    dealt = slots(parallel)
    assert [slot.cores for slot in dealt] == each_cores
    assert [slot.gpus for slot in dealt] == each_gpus
    for slot in dealt:
        assert slot.environment == ({"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {})


def test_more_jobs_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module.os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ShardlabError, match=r"sweep\.parallel=3: .* at most 2 would do"):
        slots(3)


def test_a_slot_is_taken_again_as_soon_as_its_job_ends_and_by_one_job_at_a_time() -> None:
    pool, busy, seen, lock = Pool([Slot((0,), ()), Slot((1,), ())]), set(), [], threading.Lock()
    long_ended = threading.Event()

    def work(slot: Slot, number: int) -> int:
        with lock:
            assert slot.cores not in busy
            busy.add(slot.cores)
            seen.append((number, slot.cores[0]))
        if number == 0:
            long_ended.wait(20)
        with lock:
            busy.remove(slot.cores)
        return number

    futures = [pool.submit(lambda slot, number=number: work(slot, number)) for number in range(6)]
    assert [future.result(20) for future in futures[1:]] == [1, 2, 3, 4, 5]
    assert not futures[0].done()
    long_ended.set()
    assert futures[0].result(20) == 0
    pool.close()
    assert {core for number, core in seen if number > 0} == {next(core for number, core in seen if number == 1)}


def row(number: int, status: str = "finished", *objective: float, **values: object) -> Row:
    return replace(Row(number, f"seed={number}", f"h{number}", status, objective=list(objective)), **values)  # type: ignore[arg-type]


def test_the_last_row_of_a_job_holds_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    assert rows.read() == []
    rows.write(row(1, "running"))
    rows.write(row(0, "running"))
    with rows.path.open("a") as file:
        file.write('{"event": "job", "nu')
    assert [each.status for each in rows.read()] == ["running", "running"]
    rows.write(row(1, "finished", 0.25))
    assert [(each.number, each.status, each.objective) for each in rows.read()] == [
        (0, "running", []),
        (1, "finished", [0.25]),
    ]


def test_what_finished_is_known_by_its_hash_whatever_became_of_its_number(tmp_path: Path) -> None:
    """A glob that has got a file more gives the jobs behind it new numbers."""
    rows = Rows(tmp_path)
    rows.write(row(0, "finished", 0.5))
    rows.write(row(1, "finished", 0.7))
    rows.write(replace(row(0, "finished", 0.5), number=1))
    rows.write(row(2, "pruned", 0.9))
    assert {key: each.objective for key, each in rows.finished().items()} == {"h0": [0.5], "h1": [0.7]}
    assert len(rows.read()) == 3


def record(folder: Path, end: str | None, *evals: float) -> RunRecord:
    folder.mkdir()
    (folder / "provenance.json").write_text(json.dumps({"id": "1" * 32, "name": "n", "started": 1.0}))
    (folder / "config.yaml").write_text("seed: 1\n")
    log = EventLog(folder / "events.jsonl")
    for step, loss in enumerate(evals):
        log.write("eval", split="val", step=step, loss=loss)
    if end == "pruned":
        log.write("pruned", step=7)
    if end is not None:
        log.write("end", status="FINISHED" if end == "pruned" else end, reason="why" if end != "FINISHED" else None)
    log.close()
    return RunRecord.load(folder)


OUTCOMES = [
    # the record's end, its evaluations   status      reason                 objective
    ("FINISHED", (3.0, 2.0),              "finished", "",                    [2.0]),
    ("FINISHED", (),                      "failed",   "val/loss is missing", []),
    ("FINISHED", (math.nan,),             "failed",   "val/loss is nan",     []),
    ("FINISHED", (math.inf,),             "failed",   "val/loss is inf",     []),
    ("FAILED",   (3.0,),                  "failed",   "why",                 []),
    ("KILLED",   (3.0,),                  "killed",   "why",                 []),
    ("pruned",   (3.0,),                  "pruned",   "at step 7",           [3.0]),
]  # fmt: skip


@pytest.mark.parametrize(("end", "evals", "status", "reason", "objective"), OUTCOMES)
def test_a_record_says_what_its_job_came_to(
    end: str, evals: tuple[float, ...], status: str, reason: str, objective: list[float], tmp_path: Path
) -> None:
    came_to = of_record(row(0, "running"), record(tmp_path / "run", end, *evals), ["val/loss"])
    assert (came_to.status, came_to.reason, came_to.objective) == (status, reason, objective)


def test_rows_of_a_killed_launcher_are_settled_by_their_records(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path, "a")
    record(tmp_path / "0", "FINISHED", 2.0)
    record(tmp_path / "1", "FINISHED", math.nan)
    record(tmp_path / "2", None, 2.0)
    for number in range(4):
        sweep.rows.write(row(number, "running", folder=str(number)))
    assert [each.status for each in sweep.resume()] == ["finished", "failed", "killed", "killed"]
    assert [path.name for path in sweep.unshipped()] == ["0", "1", "2"]
    link = {"uri": "u", "experiment": "e", "experiment_id": "1", "run_id": "r"}
    (tmp_path / "0/mlflow.json").write_text(json.dumps({**link, "status": "FINISHED"}))
    (tmp_path / "1/mlflow.json").write_text(json.dumps(link))
    assert [path.name for path in sweep.unshipped()] == ["1", "2"]


DAMAGED = ["[1]", "{", "\x00" * 99, '{"event":"job","time":1}', "null"]
WRONG_VALUES = [("number", "one"), ("objective", None), ("objective", ["a"]), ("status", 3), ("time", None)]


def test_a_damaged_line_costs_its_own_row_alone(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.write(row(0, "finished", 0.5))
    whole = json.loads(rows.path.read_text())
    with rows.path.open("ab") as file:
        file.write(b"\xff\xfe\n")
        for line in [*DAMAGED, *(json.dumps(whole | {key: value}) for key, value in WRONG_VALUES)]:
            file.write(line.encode() + b"\n")
    rows.write(row(1, "failed"))
    assert [(each.number, each.status) for each in rows.read()] == [(0, "finished"), (1, "failed")]


def test_a_sweep_whose_own_file_is_damaged_is_not_taken_for_another(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"space": ["a"]}'):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(ShardlabError, match=r"holds a sweep\.json that can't be read"):
            sweep_in(tmp_path, "a").claim()


def test_rows_of_many_threads_are_all_there(tmp_path: Path) -> None:
    threads = [threading.Thread(target=Rows(tmp_path).write, args=(row(n, "finished", n / 7),)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.objective for each in Rows(tmp_path).read()] == [[n / 7] for n in range(50)]


def test_who_writes_a_row_waits_for_who_is_writing_one(tmp_path: Path) -> None:
    """Else one that cuts a torn line could cut another's new one."""
    rows = Rows(tmp_path)
    rows.write(row(0, "running"))
    writing = threading.Thread(target=rows.write, args=(row(1, "running"),))
    with rows.path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writing.start()
        writing.join(0.3)
        assert len(rows.read()) == 1
    writing.join(20)
    assert len(rows.read()) == 2


FRONTS = [
    # objectives                              values of the jobs                                 none is better than
    (["val/loss"],                            [(2.0,), (1.0,), (1.0,)],                          [1]),
    (["val/accuracy"],                        [(0.5,), (0.9,), (0.7,)],                          [1]),
    (["val/loss", "perf/tokens_per_s"],       [(3, 10), (2, 20), (4, 5), (1, 1), (2.5, 25)],     [1, 3, 4]),
    (["val/loss", "perf/peak_memory"],        [(3, 10), (2, 20), (2, 10), (1, 10)],              [3]),
]  # fmt: skip


@pytest.mark.parametrize(("objectives", "values", "best"), FRONTS)
def test_the_best_jobs_are_those_that_no_other_beats(
    objectives: list[str], values: list[tuple[float, ...]], best: list[int]
) -> None:
    rows = [row(number, "finished", *each) for number, each in enumerate(values)]
    others = [row(90, "pruned", *[0.0] * len(objectives)), row(91, "failed"), row(92, "refused")]
    assert [each.number for each in best_rows([*rows, *others], objectives)] == best
    assert best_rows(others, objectives) == []


def test_the_table_and_the_csv_hold_every_job(tmp_path: Path) -> None:
    rows = [
        row(0, "finished", 0.5, overrides=["seed=1", "strategy=ddp"], seconds=2.5, folder="0"),
        row(1, "refused", reason="strategy.tensor=3 does not, divide", overrides=["seed=1", "strategy=tensor"]),
    ]
    shown = table(rows, tmp_path, ["val/loss"])
    assert "1 finished, 1 refused" in shown
    assert "strategy.tensor=3 does not, divide" in shown
    assert "best: job 0, val/loss 0.5, seed=0" in shown
    write_csv(rows, tmp_path, ["val/loss"])
    with (tmp_path / CSV).open() as file:
        read = list(csv.DictReader(file))
    assert [(line["job"], line["strategy"], line["val/loss"], line["reason"]) for line in read] == [
        ("0", "ddp", "0.5", ""),
        ("1", "tensor", "", "strategy.tensor=3 does not, divide"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == [CSV]


def test_how_a_sweep_is_run_does_not_make_it_another() -> None:
    asked = ["seed=1,2", "hydra.sweeper.n_trials=4"]
    again = ["sweep.parallel=2", "seed=1,2", "sweep.fail_fast=true", "runtime.timeout=9", "hydra/launcher=joblib"]
    assert space_of(asked, None, None) == space_of([*again, "hydra.sweep.dir=x", "hydra.launcher.n_jobs=2"], None, None)
    assert space_of(["seed=1,2"], None, None) != space_of(["seed=1,3"], None, None)
    assert space_of(["seed=1,2"], None, None) != space_of(["seed=1,2"], None, "own")
    assert space_of(["sweep.objective=train/loss"], None, None) != space_of([], None, None)


def sweep_in(folder: Path, *space: str) -> Sweep:
    return Sweep(folder, about_sweep(["shardlab"], space), ["val/loss"])


def test_the_sweeps_of_a_space_are_found_the_latest_first(tmp_path: Path) -> None:
    for name, space in (("1", "a"), ("2", "a"), ("3", "b")):
        sweep = sweep_in(tmp_path / "day" / name, space)
        sweep.claim()
        sweep.begin()
        sweep.release()
    assert list(earlier_sweeps(["a"], tmp_path)) == [tmp_path / "day/2", tmp_path / "day/1"]
    assert list(earlier_sweeps(["b"], tmp_path)) == [tmp_path / "day/3"]
    assert list(earlier_sweeps(["c"], tmp_path)) == []


def test_a_sweep_belongs_to_one_launcher_at_a_time(tmp_path: Path) -> None:
    mine, theirs, another = sweep_in(tmp_path / "s", "a"), sweep_in(tmp_path / "s", "a"), sweep_in(tmp_path / "s", "b")
    mine.claim()
    with pytest.raises(ShardlabError, match="is being run by another command"):
        theirs.claim()
    mine.begin()
    mine.release()
    theirs.claim()
    theirs.begin()
    assert json.loads((tmp_path / "s/sweep.json").read_text())["space"] == ["a"]
    theirs.release()
    with pytest.raises(ShardlabError, match="already holds another sweep"):
        another.claim()


def test_a_sweep_that_never_began_leaves_nothing_of_ours(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path / "s", "a")
    sweep.claim()
    assert (tmp_path / "s" / LOCK).exists()
    sweep.release()
    assert list((tmp_path / "s").iterdir()) == []


def test_the_lock_of_a_killed_launcher_is_free(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SweepRunsError):
            sweep_in(tmp_path, "a").claim()
    sweep_in(tmp_path, "a").claim()


def test_a_job_that_is_tried_again_gets_a_folder_beside(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "3", set()) == tmp_path / "3"
    (tmp_path / "3").mkdir()
    assert free_folder(tmp_path / "3", set()) == tmp_path / "3"
    (tmp_path / "3/events.jsonl").touch()
    assert free_folder(tmp_path / "3", set()) == tmp_path / "3-2"
    (tmp_path / "3-2").touch()
    assert free_folder(tmp_path / "3", set()) == tmp_path / "3-3"
    assert free_folder(tmp_path / "3", {tmp_path / "3-3"}) == tmp_path / "3-4"
    assert free_folder(tmp_path / "4", {tmp_path / "4"}) == tmp_path / "4-2"  # of a job that has not begun


WRONG = [
    ("test/loss", False, "test split is not to choose by; val/loss would do"),
    ("val/los", False, "did you mean 'val/loss'"),
    ("val/accuracy", False, "a language model has none"),
    ("val/perplexity", True, "a classifier has none"),
    (["val/loss", "val/loss"], False, "names one twice"),
    ([], False, "is no name"),
    (3, False, "is no name"),
    (None, None, "is no name"),
]


@pytest.mark.parametrize(("objective", "classifier", "said"), WRONG)
def test_a_wrong_objective_is_said_in_one_line(objective: object, classifier: bool | None, said: str) -> None:
    with pytest.raises(ShardlabError, match=said):
        check_objective(objective, classifier)


def test_one_objective_or_several() -> None:
    assert names_of("val/loss") == ["val/loss"]
    assert names_of(["val/loss", "perf/tokens_per_s"]) == ["val/loss", "perf/tokens_per_s"]
    check_objective("val/accuracy", None)  # the dataset is not known yet


def test_lines_say_the_best_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(("val/loss",))
    lines.began(row(0, "running"), Path("0"))
    lines.ended(row(0, "finished", 2.0))
    lines.ended(row(1, "finished", 3.0))
    lines.ended(row(2, "failed", reason="it broke"))
    lines.ended(row(3, "finished", 1.0), again=False)
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "job 0: seed=0",
        "job 0 finished, val/loss 2; the best so far",
        "job 1 finished, val/loss 3; best so far: job 0",
        "job 3 finished by an earlier call, val/loss 1",
    ]
    assert said.err.splitlines() == ["job 2 failed: it broke"]


def test_the_best_so_far_may_be_of_an_earlier_call(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(("val/loss",))
    lines.know([row(0, "finished", 2.0), row(1, "killed")])
    lines.ended(row(2, "finished", 3.0))
    assert capsys.readouterr().out == "job 2 finished, val/loss 3; best so far: job 0\n"


def test_the_table_follows_the_records_of_the_running_jobs(tmp_path: Path) -> None:
    from rich.console import Console

    shown = LiveTable(3, ("val/loss",))
    shown.ended(row(0, "finished", 2.5))
    shown.began(row(1, "running"), tmp_path)
    events = [
        {"event": "start", "total_steps": 40},
        {"event": "step", "step": 7, "loss": 3.25},
        {"event": "eval", "split": "val", "loss": 3.5},
    ]
    lines = [json.dumps({**event, "time": time.time()}) + "\n" for event in events]
    (tmp_path / "events.jsonl").write_text("".join(lines) + '{"event": "st')
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown._drawn())
    text = console.export_text()
    assert "1 of 3 jobs ended: 1 running, 1 finished" in text
    assert "best: job 0, val/loss 2.5, seed=0" in text
    assert "7/40" in text
    assert "3.25" in text
    assert "3.5" in text
    shown.ended(row(1, "pruned", 3.5))
    console.print(shown._drawn())
    text = console.export_text()
    assert "2 of 3 jobs ended: 0 running, 1 finished, 1 pruned" in text
    assert "7/40" not in text
