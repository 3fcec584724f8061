"""A rank that falls silent is found, named with the place where it hangs, and the run ended; one that works is not."""

import os
import signal
import time
from pathlib import Path

import pytest
from launch_processes import Launcher, wait_until

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.launch.stacks import REQUEST, ask_stacks

TIMEOUT = 5.0
"""Long enough for a slow machine to start ranks, import what they need and do a step of the tiny model."""
SAID = f"hangs: silent for {TIMEOUT:g} s (runtime.timeout), "


@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "tensor"])
def test_an_endless_loop_in_one_rank_of_a_training_is_named(tmp_path: Path, strategy: str) -> None:
    overrides = ["model=tiny", "dataset=pydoc", f"strategy={strategy}", "trainer.steps=9", "runtime.threads=1"]
    config = check(compose(overrides).config)
    arguments = ("spin", 1, config, tmp_path, prepare(config.dataset))
    with pytest.raises(RanksFailed) as failed:
        run_ranks("launch_hangs:train", arguments, 2, log_dir=tmp_path, timeout=TIMEOUT)
    assert failed.value.reason.startswith(f"rank 1 {SAID}in _spin at launch_faults.py:"), failed.value.reason
    assert "launch_faults.py" in failed.value.text
    assert "training/loop.py" in failed.value.text
    assert "as the launcher ends it" in (tmp_path / "rank-0.log").read_text()  # where the others wait is there too


CASES = [
    ("wait", "in _wait at launch_faults.py:"),
    ("hold lock", "in _hold_lock at launch_faults.py:"),
    ("stop", "it is stopped (SIGSTOP)"),
]


@pytest.mark.parametrize(("fault", "where"), CASES)
@pytest.mark.parametrize("at", [0, 1])
def test_the_rank_that_hangs_is_named_not_the_ones_that_wait_for_it(
    tmp_path: Path, fault: str, where: str, at: int
) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks("launch_hangs:hang", (fault, at), 3, log_dir=tmp_path, timeout=TIMEOUT)
    assert failed.value.rank == at
    assert failed.value.reason.startswith(f"rank {at} {SAID}{where}"), failed.value.reason


def test_a_rank_that_hangs_while_the_others_work_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 hangs.* in hang_alone at launch_hangs.py"):
        run_ranks("launch_hangs:hang_alone", (1,), 3, log_dir=tmp_path, timeout=TIMEOUT)


def test_of_ranks_that_wait_for_each_other_the_one_silent_longest_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RanksFailed, match=r"rank 1 hangs.* in mismatch at launch_hangs.py.*all ranks wait for each oth"
    ):
        run_ranks("launch_hangs:mismatch", (), 2, log_dir=tmp_path, timeout=TIMEOUT)


def test_a_rank_that_hangs_before_it_meets_the_others_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "never_imported.py").write_text("while True: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RanksFailed, match=r"rank 0 hangs.* in <module> at never_imported.py:1"):
        run_ranks("never_imported:f", (), 1, log_dir=tmp_path, timeout=TIMEOUT)


def test_long_work_that_beats_is_left_alone(tmp_path: Path) -> None:
    assert run_ranks("launch_hangs:work_alone", (3 * TIMEOUT,), 2, log_dir=tmp_path, timeout=TIMEOUT) == [2.0, 2.0]


def test_time_in_which_the_launcher_was_stopped_too_is_nobodys_silence(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from shardlab.launch.ranks import run_ranks
print(run_ranks("launch_hangs:beat_for", (5, Path.cwd()), 2, log_dir=Path.cwd(), timeout={TIMEOUT}))
"""
    launcher = Launcher(code, tmp_path)
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
        os.killpg(launcher.process.pid, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT)
        os.killpg(launcher.process.pid, signal.SIGCONT)
        assert launcher.end(60) == 0, launcher.output
        assert launcher.output == "[0, 1]\n"
    finally:
        launcher.kill()


def test_being_asked_for_stacks_disturbs_no_collective(tmp_path: Path) -> None:
    """The signal interrupts system calls of every library in the rank."""
    asked = []

    def poll() -> None:
        for folder in watch_folders:
            ranks = rank_processes()
            for process in ranks:
                os.kill(process, REQUEST)
            asked.append(ask_stacks(dict(enumerate(ranks)), folder))

    def rank_processes() -> list[int]:
        return [process.pid for process in crew]

    from shardlab.launch import fork_server

    crew, watch_folders = [], set()
    start = fork_server.start

    def noted(place, orders):
        started = start(place, orders)
        crew.append(started[0])
        watch_folders.add(orders.watched)
        return started

    fork_server.start = noted
    try:
        said = run_ranks("launch_hangs:stacks_are_asked", (5.0,), 2, log_dir=tmp_path, poll=poll, timeout=600.0)
    finally:
        fork_server.start = start
    assert said == [2.0, 2.0]
    assert any(len(stacks) == 2 for stacks in asked)
