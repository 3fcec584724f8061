"""A run's life: every end is written, and a folder belongs to one run."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_parts import FINGERPRINT, composed, stand_in
from launch_processes import LIGHT, Launcher, wait_until
from omegaconf import OmegaConf

from shardlab.cli import main
from shardlab.errors import ShardlabError
from shardlab.launch import ranks
from shardlab.launch import run as run_module
from shardlab.launch.run import RunFailed, run
from shardlab.tracking.record import RunRecord, read_events


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAIN_RANK", "prepare"):
        monkeypatch.setattr(run_module, name, getattr(run_module, name))
    stand_in(run_module)


def test_a_finished_run_has_a_whole_folder(capsys: pytest.CaptureFixture[str]) -> None:
    hydra = OmegaConf.create({"overrides": {"task": ["tracking.uri=http://me:secret@host"]}})
    record = run(composed("none", "tracking.uri=http://me:secret@host"), hydra=hydra)
    assert (record.status, record.reason, record.name) == ("FINISHED", None, "none-ddp2-s1")
    assert record.losses == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert record.peak_memory == {0: 100, 1: 101}
    names = {str(path.relative_to("run")) for path in Path("run").rglob("*") if path.is_file()}
    assert names == {
        "config.yaml",
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
        "provenance.json",
        "events.jsonl",
        "rank-1.jsonl",
        "rank-0.log",
        "rank-1.log",
    }
    assert all("secret" not in path.read_text() for path in Path("run").rglob("*") if path.is_file())
    provenance = json.loads(Path("run/provenance.json").read_text())
    assert provenance["data"] == {"name": "pydoc", "fingerprint": FINGERPRINT}
    assert len(provenance["id"]) == 32
    assert provenance["versions"]["torch"]
    said = capsys.readouterr()
    assert "none-ddp2-s1 finished after 4 steps" in said.out
    assert "val   loss 0.3, perplexity 1.3 (step 4)" in said.out
    assert "step 4/4, loss 0.25" in said.err


def test_a_folder_that_holds_a_run_is_refused_and_left_alone() -> None:
    run(composed())
    before = Path("run/events.jsonl").read_bytes()
    with pytest.raises(ShardlabError, match="run_dir=run already holds a run"):
        run(composed())
    assert Path("run/events.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["config.yaml", ".hydra/hydra.yaml", "checkpoints/best.safetensors", "rank-0.log"])
def test_a_folder_with_files_that_a_run_would_overwrite_is_refused(tmp_path: Path, name: str) -> None:
    """`run_dir=.` in a project's folder once overwrote the user's own config.yaml."""
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("mine")
    made = composed()
    with pytest.raises(ShardlabError, match=r"run_dir=\. holds \S+, which a run would overwrite; .* run_dir=run$"):
        run(replace(made, config=replace(made.config, run_dir=".")))
    assert theirs.read_text() == "mine"
    assert not Path("provenance.json").exists()


def test_a_folder_with_other_files_is_fine() -> None:
    Path("run").mkdir()
    Path("run/notes.txt").touch()
    assert run(composed()).status == "FINISHED"


def test_wrong_data_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object, global_batch: int) -> Path:
        raise ShardlabError("dataset pydoc: line 3 is wrong")

    monkeypatch.setattr(run_module, "prepare", refuse)
    with pytest.raises(ShardlabError, match="line 3 is wrong"):
        run(composed())
    assert not Path("run").exists()


FAILURES = [
    # fault            raised                                            reason in the record
    ("value error", RunFailed, "rank 1 raised ValueError: the step is broken"),
    ("kill", RunFailed, "rank 1 was killed by SIGKILL (out of memory?)"),
    ("user error", ShardlabError, "trainer.global_batch=9 leaves no step; at most 4 would"),
]


@pytest.mark.parametrize(("fault", "kind", "reason"), FAILURES)
def test_a_failed_run_says_why_in_its_record(fault: str, kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind) as raised:
        run(composed(fault))
    record = RunRecord.load(Path("run"))
    assert (record.status, record.reason) == ("FAILED", reason)
    assert reason in str(raised.value)


def test_the_command_says_once_why_its_run_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "strategy=ddp", "tracking=none", "run_dir=run", "model.name=kill"]) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "SIGKILL" in line]
    assert said == [
        "kill-ddp2-s1 failed: rank 1 was killed by SIGKILL (out of memory?) (more in run/rank-*.log)",
    ]


def test_a_line_torn_by_a_killed_rank_is_cut_before_the_end_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "TRAIN_RANK", "launch_faults:tear")
    with pytest.raises(RunFailed, match="SIGKILL"):
        run(composed())
    assert [event["event"] for event in read_events(Path("run/events.jsonl"))] == ["step", "end"]
    assert b"torn" not in Path("run/events.jsonl").read_bytes()


CODE = """
from launch_parts import composed, stand_in
from shardlab.launch import ranks
from shardlab.launch import run as run_module
stand_in(run_module)
try:
    run_module.run(composed("spin"))
except BaseException as error:
    print("raised", repr(error))
"""

INTERRUPTS = [
    ("SIGINT", "KeyboardInterrupt()", "interrupted"),
    ("SIGTERM", "SystemExit(143)", "interrupted by SIGTERM"),
]


@pytest.mark.parametrize(("name", "raised", "reason"), INTERRUPTS)
def test_an_interrupted_run_is_killed_and_leaves_no_process(
    tmp_path: Path, name: str, raised: str, reason: str
) -> None:
    launcher = Launcher(LIGHT + CODE, tmp_path)
    try:
        events = tmp_path / "run" / "events.jsonl"
        assert wait_until(lambda: events.exists() and b'"step": 4' in events.read_bytes()), launcher.output
        os.kill(launcher.process.pid, signal.Signals[name])
        assert launcher.end() == 0, launcher.output
        assert launcher.left_after() == []
    finally:
        launcher.kill()
    assert f"raised {raised}" in launcher.output
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.reason) == ("KILLED", reason)
    assert f"spin-ddp2-s1 killed: {reason}" in launcher.output.splitlines()


AFTER = [
    # the run was   the moment of Ctrl-C                 status in the record
    ("none", (run_module, "say"), "FINISHED"),
    ("value error", (run_module, "say"), "FAILED"),
    ("value error", (ranks, "_end"), "KILLED"),
]


@pytest.mark.parametrize(("fault", "moment", "status"), AFTER)
def test_ctrl_c_after_the_ranks_have_ended_still_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, moment: Any, status: str
) -> None:
    """Around a failed run it was once lost, and a sweep went on."""
    monkeypatch.setattr(*moment, strike_then(getattr(*moment)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(composed(fault))
    finally:
        signal.signal(signal.SIGINT, before)
    assert RunRecord.load(Path("run")).status == status


def strike_then(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, begun by a Ctrl-C."""

    def struck(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments)

    return struck
