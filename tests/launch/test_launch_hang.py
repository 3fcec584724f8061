"""A rank that falls silent is found, named with the place where it hangs, and the run ended; one that works is not."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launch_processes import LIGHT, Launcher, at_once, wait_until

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.launch.stacks import REQUEST, ask_stacks

TIMEOUT = 5.0
"""Long enough for a slow machine to start ranks, import what they need and do a step of the tiny model."""
SAID = f"hangs: silent for {TIMEOUT:g} s (runtime.timeout), "


def tiny(*overrides: str) -> Config:
    return check(compose(["model=tiny", "dataset=pydoc", "runtime.threads=1", *overrides]).config)


@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "tensor"])
def test_an_endless_loop_in_one_rank_of_a_training_is_named(tmp_path: Path, strategy: str) -> None:
    # The ranks' own timeout is shorter than the launcher's, and must not come first: it would name those that wait.
    config = tiny(f"strategy={strategy}", f"runtime.timeout={TIMEOUT / 2}", "trainer.steps=9")
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


def hung(folder: Path, *launches: tuple[str, tuple[object, ...], int]) -> list[RanksFailed]:
    """How each of several launches, all at once, has failed: nearly all of their time is waiting for silence."""
    folders = [folder / str(number) for number in range(len(launches))]
    for each in folders:
        each.mkdir()
    ends = at_once(
        *(
            lambda launch=launch, each=each: run_ranks(*launch, log_dir=each, timeout=TIMEOUT)
            for launch, each in zip(launches, folders, strict=True)
        )
    )
    assert all(isinstance(end, RanksFailed) for end in ends), ends
    return ends


@pytest.mark.parametrize("at", [0, 1])
def test_the_rank_that_hangs_is_named_not_the_ones_that_wait_for_it(tmp_path: Path, at: int) -> None:
    failed = hung(tmp_path, *(("launch_hangs:hang", (fault, at), 3) for fault, _ in CASES))
    for end, (_, where) in zip(failed, CASES, strict=True):
        assert end.rank == at
        assert end.reason.startswith(f"rank {at} {SAID}{where}"), end.reason


OTHERS = [
    # a rank hangs                                     said of it
    (("launch_hangs:hang_alone", (1,), 3), r"rank 1 hangs.* in hang_alone at launch_hangs.py"),  # the others work
    # all wait for each other: the one silent longest
    (("launch_hangs:mismatch", (), 2), r"rank 1 hangs.* in mismatch at launch_hangs.py.*all ranks wait for"),
    # before it meets the others
    (("never_imported:f", (), 1), r"rank 0 hangs.* in <module> at never_imported.py:1"),
]


def test_a_rank_that_hangs_is_named_whatever_the_others_do(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "never_imported.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for end, (_, said) in zip(hung(tmp_path, *(launch for launch, _ in OTHERS)), OTHERS, strict=True):
        assert re.match(said, end.reason), end.reason


@pytest.mark.parametrize("strategy", ["single", "ddp", "pipeline"])
def test_every_part_of_a_training_beats(tmp_path: Path, strategy: str) -> None:
    config = tiny(f"strategy={strategy}", "trainer.micro_batches=4")
    arguments = (config, tmp_path, prepare(config.dataset))
    for said in run_ranks("launch_hangs:beats", arguments, config.ranks, log_dir=tmp_path, timeout=600.0):
        micro_batches = 2 if strategy == "ddp" else 4
        assert said["build"] >= said["parameters"]
        assert said["step"] >= 2 * micro_batches + 1
        assert said["backward"] >= micro_batches
        assert said["evaluation"] >= 3 * (micro_batches + 1)
        assert said["load"] >= said["parameters"]
    assert said["save"] >= said["parameters"] or strategy == "ddp"  # where rank 0 saves for all


def test_long_work_that_beats_is_left_alone(tmp_path: Path) -> None:
    assert run_ranks("launch_hangs:work_alone", (1.6 * TIMEOUT,), 2, log_dir=tmp_path, timeout=TIMEOUT) == [2.0, 2.0]


def test_time_in_which_the_launcher_was_stopped_too_is_nobodys_silence(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from shardlab.launch.ranks import run_ranks
print(run_ranks("launch_hangs:beat_seldom", (Path.cwd(),), 2, log_dir=Path.cwd(), timeout={TIMEOUT}))
"""
    launcher = Launcher(LIGHT + code, tmp_path)
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
        os.killpg(launcher.process.pid, signal.SIGSTOP)
        time.sleep(1.6 * TIMEOUT)
        os.kill(launcher.process.pid, signal.SIGCONT)
        time.sleep(1)  # now it looks at ranks that have stood still for longer than they may
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
        said = run_ranks("launch_hangs:stacks_are_asked", (2.0,), 2, log_dir=tmp_path, poll=poll, timeout=600.0)
    finally:
        fork_server.start = start
    assert said == [2.0, 2.0]
    assert any(len(stacks) == 2 for stacks in asked)
