"""Nothing is left running, whatever ends the launcher: a rank that is busy, and one that waits for it."""

import os
import signal
import time
from pathlib import Path

import pytest
from launch_processes import WITH_TORCH, Launcher, wait_until

CODE = """
import sys
from pathlib import Path
from shardlab.launch.ranks import run_ranks
run_ranks("launch_faults:work", (sys.argv[1], 1, Path.cwd()), 2, log_dir=Path.cwd())
"""

CASES = [
    # signals sent, each to       whom        rank 1 is     exit status, one of
    (["SIGINT"], "launcher", "spin", {-signal.SIGINT}),
    (["SIGINT"], "group", "wait", {-signal.SIGINT}),
    (["SIGINT", "SIGINT", "SIGINT"], "group", "spin", {-signal.SIGINT}),
    (["SIGTERM"], "launcher", "hold lock", {143}),
    (["SIGTERM"], "group", "spin", {143}),
    # Python looks at signals that came together by their numbers, and the second may come when all is over.
    (["SIGTERM", "SIGINT"], "launcher", "wait", {143, -signal.SIGINT}),
    (["SIGHUP"], "launcher", "spin", {129}),
    (["SIGKILL"], "launcher", "spin", {-signal.SIGKILL}),
    (["SIGKILL"], "launcher", "hold lock", {-signal.SIGKILL}),
]


@pytest.mark.parametrize(("signals", "whom", "fault", "statuses"), CASES)
def test_a_signal_leaves_no_process(
    tmp_path: Path, signals: list[str], whom: str, fault: str, statuses: set[int]
) -> None:
    launcher = Launcher(WITH_TORCH + CODE, tmp_path, fault)
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
        time.sleep(0.1)  # now rank 1 is in its fault and rank 0 in the collective
        for name in signals:
            send = os.killpg if whom == "group" else os.kill
            send(launcher.process.pid, signal.Signals[name])
            time.sleep(0.01)
        assert launcher.end(seconds=5) in statuses, launcher.output
        assert launcher.left_after() == []
    finally:
        launcher.kill()


def test_a_signal_ends_the_wait_for_the_fork_server(tmp_path: Path) -> None:
    """The import of torch takes seconds, in which Ctrl-C must not seem dead."""
    (tmp_path / "slow_import.py").write_text("import time; open('importing', 'w').close(); time.sleep(30)")
    code = f"import shardlab.launch.fork_server as fork_server; fork_server.PRELOAD = ['slow_import']\n{CODE}"
    launcher = Launcher(f"import os; os.environ['PYTHONPATH'] += ':{tmp_path}'\n{code}", tmp_path, "none")
    try:
        assert wait_until((tmp_path / "importing").exists)
        os.killpg(launcher.process.pid, signal.SIGINT)
        assert launcher.end(seconds=2) == -signal.SIGINT, launcher.output
        # The server itself ends when its import does; what matters is that no rank was started.
        assert not list(tmp_path.glob("rank-*"))
    finally:
        launcher.kill()
