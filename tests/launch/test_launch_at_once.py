"""Several launches at once, each in a thread of one process: none disturbs another, and a signal ends all."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_processes import WITH_TORCH, Launcher, at_once, wait_until

from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.launch.signals import Stop, Stopped


def test_one_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    def launch(fault: str) -> Callable[[], Any]:
        folder = tmp_path / fault
        folder.mkdir()
        return lambda: run_ranks("launch_faults:work", (fault,), 2, log_dir=folder, timeout=60.0)

    failed, finished, killed = at_once(launch("value error"), launch("none"), launch("kill"))
    assert isinstance(failed, RanksFailed)
    assert failed.reason == "rank 1 raised ValueError: the step is broken"
    assert finished == [1, 1]
    assert isinstance(killed, RanksFailed)
    assert killed.reason == "rank 1 was killed by SIGKILL (out of memory?)"


def test_many_launches_of_many_threads_all_come_to_their_end(tmp_path: Path) -> None:
    """multiprocessing looks at the processes of all threads, and two that look at once get an end wrong."""

    def launch() -> list[Any]:
        return [run_ranks("launch_faults:answer", (n,), 2, log_dir=tmp_path) for n in range(10)]

    assert at_once(*[launch] * 6) == [[[(0, n), (1, n)] for n in range(10)]] * 6


def test_a_stop_ends_its_own_launch_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stop = Stop()

    def poll() -> None:
        if len(list(tmp_path.glob("*.ready"))) == 2:
            stop.pull("another job failed")

    stopped, finished = at_once(
        lambda: run_ranks("launch_faults:work", ("spin", 1, tmp_path), 2, log_dir=tmp_path, poll=poll, stop=stop),
        lambda: run_ranks("launch_hangs:beat_for", (4,), 2, log_dir=tmp_path / "other", stop=Stop()),
    )
    assert isinstance(stopped, Stopped)
    assert stopped.reason == "another job failed"
    assert finished == [0, 1]
    for ready in tmp_path.glob("rank-*.ready"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(ready.read_text()), 0)


def test_a_stop_that_was_pulled_before_starts_nothing(tmp_path: Path) -> None:
    stop = Stop()
    stop.pull("too late")
    with pytest.raises(Stopped, match="too late"):
        run_ranks("launch_faults:answer", (0,), 1, log_dir=tmp_path, stop=stop)
    assert not list(tmp_path.glob("rank-*"))


TWO = """
import threading
from pathlib import Path
from shardlab.launch.ranks import run_ranks
from shardlab.launch.signals import Signals
ends = []
def launch(name):
    folder = Path(name)
    folder.mkdir()
    try:
        run_ranks("launch_faults:work", ("spin", 1, folder), 2, log_dir=folder)
    except BaseException as error:
        ends.append(repr(error))
with Signals() as signals:
    threads = [threading.Thread(target=launch, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(sorted(ends))
signals.check()
"""


@pytest.mark.parametrize(
    ("sent", "whom", "end", "status"),
    [
        (signal.SIGINT, os.killpg, "KeyboardInterrupt()", -signal.SIGINT),
        (signal.SIGTERM, os.kill, "SystemExit(143)", 143),
    ],
)
def test_a_signal_ends_the_launches_of_all_threads(tmp_path: Path, sent, whom, end: str, status: int) -> None:
    launcher = Launcher(WITH_TORCH + TWO, tmp_path)
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*/*.ready"))) == 4, 60)
        whom(launcher.process.pid, sent)
        assert launcher.end(30) == status, launcher.output
        assert str([end, end]) in launcher.output
        assert launcher.left_after() == []
    finally:
        launcher.kill()


def test_a_signal_ends_the_wait_of_all_threads_for_the_fork_server(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time; open('importing', 'w').close(); time.sleep(30)")
    code = f"import shardlab.launch.fork_server as fork_server; fork_server.PRELOAD = ['slow_import']\n{TWO}"
    launcher = Launcher(f"import os; os.environ['PYTHONPATH'] += ':{tmp_path}'\n{code}", tmp_path)
    try:
        assert wait_until((tmp_path / "importing").exists)
        time.sleep(0.3)
        sent = time.monotonic()
        os.killpg(launcher.process.pid, signal.SIGINT)
        assert launcher.end(20) == -signal.SIGINT, launcher.output
        assert time.monotonic() - sent < 20
        assert not list(tmp_path.glob("*/rank-*"))
    finally:
        launcher.kill()


def test_the_cores_are_those_of_every_thread_of_the_ranks(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))

    def launch(core: int) -> Callable[[], Any]:
        return lambda: run_ranks("launch_hangs:cores_of_all_threads", (), 2, log_dir=tmp_path, cores=(core,))

    first, last = at_once(launch(cores[0]), launch(cores[-1]))
    for said, core in ((first, cores[0]), (last, cores[-1])):
        assert all(allowed == {core} for rank in said for allowed in rank)
    assert os.sched_getaffinity(0) == set(cores)


def test_cores_that_are_not_there_are_the_ranks_failure(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 raised OSError.*Invalid argument"):
        run_ranks("launch_faults:answer", (0,), 1, log_dir=tmp_path, cores=(4095,))
