"""The same command under torchrun, or as srun starts it, is one run: one folder, one record, one account of its end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from join_processes import (
    ALONE,
    COMMAND,
    SECONDS,
    SHORT,
    TORCHRUN,
    kill_all,
    launcher_of,
    lines,
    send,
    torchrun,
    two_hosts,
    why_no_hosts,
)
from launch_processes import HERE, Launcher, wait_until

from shardlab.cluster.network import free_port
from shardlab.tracking.record import RunRecord


def steps(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on how the ranks were started, of each step and evaluation, in full precision."""
    keys = ("event", "step", "split", "loss", "grad_norm", "lr", "tokens", "perplexity")
    events = RunRecord.load(folder).events
    return [tuple(event.get(key) for key in keys) for event in events if event["event"] in ("step", "eval", "best")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[tuple[Any, ...]]:
    """The steps of the run that one command makes alone."""
    folder = tmp_path_factory.mktemp("plain")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "SHARDLAB_CACHE": str(cache), "PYTHONPATH": path}
    words = [sys.executable, COMMAND, "train", *SHORT, "ranks=2", "runtime.threads=1", f"run_dir={folder}/run"]
    subprocess.run(words, check=True, capture_output=True, env=environment, timeout=SECONDS)
    return steps(folder / "run")


def test_a_run_under_torchrun_is_the_plain_one_bit_for_bit(tmp_path: Path, plain: list[Any]) -> None:
    launcher = torchrun(tmp_path, *SHORT, "runtime.threads=1")
    try:
        assert launcher.end(SECONDS) == 0, launcher.output
        assert launcher.left_after(10) == []
    finally:
        launcher.kill()
    [folder] = tmp_path.glob("runs/*/*")  # ${now:} was composed once
    assert steps(folder) == plain
    assert RunRecord.load(folder).status == "FINISHED"
    assert {"rank-0.log", "rank-1.log", "rank-1.jsonl"} <= {file.name for file in folder.iterdir()}
    assert len(lines(launcher, "finished after 4 steps")) == 1
    assert "ranks=2" in json.loads((folder / "provenance.json").read_text())["overrides"]


def srun(folder: Path, *words: str, ranks: int = 2, **changed: str) -> list[Launcher]:
    """What srun would start: the same command, told apart by Slurm's variables alone."""
    port = str(free_port())
    launchers = []
    for rank in range(ranks):
        variables = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(ranks), "SLURM_LOCALID": str(rank)}
        variables |= {"SLURM_PROCID": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **changed}
        (folder / str(rank)).mkdir()
        code = f"import os; os.environ.update({variables!r}); os.chdir('..')\n{ALONE}"
        launchers.append(Launcher(code, folder / str(rank), "train", *words))
    return launchers


def test_a_run_as_srun_starts_it_is_the_plain_one_bit_for_bit(tmp_path: Path, plain: list[Any]) -> None:
    launchers = srun(tmp_path, *SHORT, "runtime.threads=1", "run_dir=run")
    try:
        assert [launcher.end(SECONDS) for launcher in launchers] == [0, 0], launchers[0].output
        assert [launcher.left_after(10) for launcher in launchers] == [[], []]
    finally:
        kill_all(*launchers)
    assert steps(tmp_path / "run") == plain
    assert launchers[1].output == ""


FAULTS = [
    # started by    fault   rank    reason in the record
    ("torchrun", "value error", 1, "rank 1 raised ValueError: the step is broken"),
    ("srun", "value error", 0, "rank 0 raised ValueError: the step is broken"),
    ("torchrun", "kill", 1, "rank 1 was killed by SIGKILL (out of memory?)"),
    ("srun", "leave", 1, "rank 1 left with exit status 7 before it had finished"),
]


@pytest.mark.parametrize(("by", "fault", "rank", "reason"), FAULTS)
def test_a_rank_that_fails_ends_the_job_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, fault: str, rank: int, reason: str
) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_RANK", str(rank))
    words = [*SHORT, "run_dir=run"]
    launchers = srun(tmp_path, *words) if by == "srun" else [torchrun(tmp_path, *words)]
    try:
        assert {launcher.end(SECONDS) for launcher in launchers} == {1}, _outputs(launchers)
        assert all(launcher.left_after(10) == [] for launcher in launchers)
    finally:
        kill_all(*launchers)
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.reason) == ("FAILED", reason)
    assert [len(lines(launcher, reason)) for launcher in launchers] == [1, 0][: len(launchers)], _outputs(launchers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_whichever_launcher_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("FAULT", "wait")
    monkeypatch.setenv("FAULT_RANK", str(rank))
    launchers = srun(tmp_path, *SHORT, "run_dir=run", "runtime.timeout=20")
    try:
        assert [launcher.end(SECONDS) for launcher in launchers] == [1, 1], launchers[0].output
        assert [launcher.left_after(10) for launcher in launchers] == [[], []]
    finally:
        kill_all(*launchers)
    reason = RunRecord.load(tmp_path / "run").reason
    assert reason is not None
    assert reason.startswith(f"rank {rank} hangs: silent for 20 s (runtime.timeout), in _wait at launch_faults.py:")


def test_a_launcher_that_is_killed_is_named_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the others at once when one has gone, and the record once said that SIGTERM was the cause."""
    monkeypatch.setenv("FAULT", "wait")
    monkeypatch.setenv("FAULT_RANK", "0")
    launcher = torchrun(tmp_path, *SHORT, "run_dir=run")
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("run/*.ready"))) == 2, SECONDS), launcher.output
        send(launcher_of(launcher, 1), "SIGKILL")
        assert launcher.end(SECONDS) == 1, launcher.output
        assert launcher.left_after(10) == []
    finally:
        launcher.kill()
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "FAILED"
    assert record.reason is not None
    assert record.reason.startswith("rank 1 on ")
    assert "is lost: its launcher has gone" in record.reason


SIGNALS = [
    # signal     sent to                 reason in the record
    ("SIGINT", "torchrun", "interrupted"),
    ("SIGTERM", "torchrun", "interrupted by SIGTERM"),
    ("SIGTERM", "the follower", "interrupted by SIGTERM"),
]


@pytest.mark.parametrize(("name", "whom", "reason"), SIGNALS)
def test_a_signal_ends_the_whole_job_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whom: str, reason: str
) -> None:
    monkeypatch.setenv("FAULT", "wait")
    monkeypatch.setenv("FAULT_RANK", "0")
    launcher = torchrun(tmp_path, *SHORT, "run_dir=run")
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("run/*.ready"))) == 2, SECONDS), launcher.output
        send(launcher.process.pid if whom == "torchrun" else launcher_of(launcher, 1), name)
        launcher.end(SECONDS)
        assert launcher.left_after(10) == []
    finally:
        launcher.kill()
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "KILLED", launcher.output
    assert record.reason is not None
    assert record.reason.startswith(reason)


REFUSED = [
    # words                                 what the one line says
    (["model.n_layerz=2"], "unknown key 'model.n_layerz'; did you mean 'model.n_layers'?"),
    (["strategy=ddp", "ranks=3"], "the config has ranks=3, and this job has 2 processes (WORLD_SIZE=2); set ranks=2"),
    ([], "strategy=single trains on one rank, and this job has 2 processes (WORLD_SIZE=2); strategy=ddp, pipeline"),
    (["strategy=hybrid"], "the axes of strategy=hybrid make 4 ranks, but ranks=2; set ranks=4"),
    (["-m", "strategy=ddp", "seed=1,2", "sweep.parallel=2"], "each run takes them all; sweep.parallel=1 would do"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_a_wrong_config_is_one_line_from_the_lead_and_status_2_everywhere(
    tmp_path: Path, words: list[str], line: str
) -> None:
    launchers = srun(tmp_path, "tracking=none", *words)
    try:
        assert [launcher.end(SECONDS) for launcher in launchers] == [2, 2], launchers[0].output
        assert [launcher.left_after(10) for launcher in launchers] == [[], []]
    finally:
        kill_all(*launchers)
    [said] = launchers[0].output.splitlines()
    assert line in said
    assert launchers[1].output == ""
    assert not (tmp_path / "runs").exists()


def test_torchrun_reports_status_2_of_a_wrong_config_that_is_said_once(tmp_path: Path) -> None:
    launcher = torchrun(tmp_path, "model.n_layerz=2")
    try:
        assert launcher.end(SECONDS) == 1  # torchrun's own for any failure
    finally:
        launcher.kill()
    assert len(lines(launcher, "unknown key 'model.n_layerz'")) == 1
    assert lines(launcher, "exitcode  : 2"), launcher.output
    assert not lines(launcher, 'Traceback (most recent call last):\n  File "' + COMMAND)


def test_a_sweep_runs_its_jobs_one_after_the_other_on_the_same_followers(tmp_path: Path) -> None:
    launchers = srun(tmp_path, "-m", *SHORT, "strategy=ddp,single,tensor", "hydra.sweep.dir=all")
    try:
        assert [launcher.end(SECONDS) for launcher in launchers] == [1, 1], launchers[0].output
    finally:
        kill_all(*launchers)
    assert {folder.name for folder in (tmp_path / "all").iterdir() if folder.is_dir()} == {"0", "2"}
    assert [RunRecord.load(tmp_path / "all" / job).status for job in ("0", "2")] == ["FINISHED", "FINISHED"]
    assert lines(launchers[0], "job 1 refused: strategy=single trains on one rank")


_no_hosts = why_no_hosts()


@pytest.mark.skipif(_no_hosts != "", reason=_no_hosts or "none")
def test_a_run_on_two_hosts_is_the_plain_one_bit_for_bit(tmp_path: Path, plain: list[Any]) -> None:
    with two_hosts() as hosts:
        launchers = [start_on(hosts, host, tmp_path, *SHORT, "runtime.threads=1") for host in range(2)]
        try:
            assert [launcher.end(SECONDS) for launcher in launchers] == [0, 0], _outputs(launchers)
            assert [launcher.left_after(10) for launcher in launchers] == [[], []]
        finally:
            kill_all(*launchers)
    assert steps(tmp_path / "run") == plain
    assert not lines(launchers[1], "tiny-ddp2")


@pytest.mark.skipif(_no_hosts != "", reason=_no_hosts or "none")
@pytest.mark.parametrize("waits", ["0", "1"])
def test_a_cut_cable_ends_the_run_on_both_hosts_and_each_names_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """A host that is cut off sends no goodbye: only silence tells."""
    monkeypatch.setenv("FAULT", "wait")
    monkeypatch.setenv("FAULT_RANK", waits)
    with two_hosts() as hosts:
        words = [*SHORT, "runtime.timeout=10"]
        launchers = [start_on(hosts, host, tmp_path, *words) for host in range(2)]
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("run/*.ready"))) == 2, SECONDS), _outputs(launchers)
            hosts.cut()
            assert [launcher.end(SECONDS) for launcher in launchers] == [1, 1], _outputs(launchers)
            assert [launcher.left_after(10) for launcher in launchers] == [[], []]
        finally:
            kill_all(*launchers)
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "FAILED"
    assert record.reason is not None
    assert record.reason.startswith("rank 1 on host-b is lost: "), record.reason
    assert lines(launchers[1], "rank 1 on host-b: the lead (rank 0 on 10.231.17.1) is lost: "), _outputs(launchers)


def start_on(hosts: Any, host: int, folder: Path, *words: str) -> Launcher:
    """torchrun on one of two hosts; the folder is on both."""
    options = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={host}", f"--master-addr={hosts.addresses[0]}"]
    code = f"import os; os.chdir('..')\n{TORCHRUN}"
    words = (*options, "--master-port=29500", COMMAND, "train", *words, "run_dir=run")
    return hosts.start(host, code, folder / "ab"[host], *words)


def _outputs(launchers: list[Launcher]) -> str:
    return "\n---\n".join(launcher.output for launcher in launchers)
