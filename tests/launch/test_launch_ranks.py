"""run_ranks with real processes: results, surroundings, output, and the first cause of every way to fail."""

import os
import threading
import time
from pathlib import Path

import pytest
from launch_processes import LIGHT, WITH_TORCH, Launcher

from shardlab.launch.ranks import RanksFailed, run_ranks


def test_results_come_back_by_rank_and_nothing_heavy_is_imported_here(tmp_path: Path) -> None:
    value = list(range(200_000))  # more than a pipe holds
    assert run_ranks("launch_faults:answer", (value,), 3, log_dir=tmp_path) == [(rank, value) for rank in range(3)]
    assert run_ranks("launch_faults:work", (), 2, log_dir=tmp_path) == [1, 1]


def test_every_launch_finds_torch_loaded_in_one_server(tmp_path: Path) -> None:
    """That is what makes a later launch take hundredths of a second: nothing is imported for it."""
    origins = [run_ranks("launch_faults:origin", (), 2, log_dir=tmp_path) for _ in range(2)]
    ranks = [rank for launch in origins for rank in launch]
    assert len({server for _, server, _ in ranks} - {os.getpid()}) == 1
    assert all(torch_is_loaded for _, _, torch_is_loaded in ranks)


CAUSES = [
    # fault                     what the launcher says of rank 1                               in its log
    ("value error", "rank 1 raised ValueError: the step is broken", "ValueError: the step is broken"),
    ("user error", "rank 1 raised ShardlabError: trainer.global_batch=9 leaves no step; at most 4 would", "Traceback"),
    ("error in the clean-up", "rank 1 raised KeyError: 'lost'", "KeyError: 'lost'"),
    ("unprintable error", "rank 1 raised Mute", "Mute"),
    ("kill", "rank 1 was killed by SIGKILL (out of memory?)", "rank 1 meets kill"),
    ("segfault", "rank 1 was killed by SIGSEGV", "_segfault"),
    ("leave", "rank 1 left with exit status 7 before it had finished", "rank 1 meets leave"),
    ("leave mute", "rank 1 left with exit status 0 before it had finished", "rank 1 meets leave mute"),
    ("exit", "rank 1 raised RuntimeError: exit was called with 3", "SystemExit: 3"),
    ("exit quietly", "rank 1 raised RuntimeError: exit was called with 0", "SystemExit: 0"),
]


@pytest.mark.parametrize(("fault", "reason", "logged"), CAUSES)
def test_the_first_cause_is_named_and_the_others_are_ended(
    tmp_path: Path, fault: str, reason: str, logged: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks("launch_faults:work", (fault, 1, tmp_path), 3, log_dir=tmp_path)
    assert time.monotonic() - started < 10
    assert (failed.value.rank, failed.value.reason) == (1, reason)
    assert (failed.value.user_error is not None) == (fault == "user error")
    assert logged in (tmp_path / "rank-1.log").read_text()
    for ready in tmp_path.glob("rank-*.ready"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(ready.read_text()), 0)


@pytest.mark.parametrize("name", ["launch_faults:unpicklable", "launch_faults:missing", "no_such_module:f"])
def test_what_the_rank_cannot_import_or_send_is_its_failure(tmp_path: Path, name: str) -> None:
    with pytest.raises(RanksFailed, match="rank 0 raised"):
        run_ranks(name, (), 1, log_dir=tmp_path)


def test_a_function_that_no_rank_could_import_is_refused_before_any_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must stand at the top of a module"):
        run_ranks(lambda place: None, (), 1, log_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_rank_finds_the_folder_and_environment_of_this_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks("launch_faults:answer", (0,), 1, log_dir=tmp_path)  # the fork server now has an older environment
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLAB_TEST", "old")
    [(folder, value, modules)] = run_ranks(
        "launch_faults:where", (), 1, log_dir=tmp_path, environment={"SHARDLAB_TEST": "new"}
    )
    assert (folder, value) == (str(tmp_path), "new")
    assert "mlflow" not in modules


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from shardlab.launch.ranks import run_ranks
print("the script runs")
print(run_ranks("launch_faults:answer", (5,), 2, log_dir=Path.cwd()), sys.modules["__main__"].__file__)
"""
    (tmp_path / "script.py").write_text(script)
    launcher = Launcher(f"{LIGHT}import runpy; runpy.run_path('script.py', run_name='__main__')", tmp_path)
    assert launcher.end() == 0, launcher.output
    assert launcher.output == "the script runs\n[(0, 5), (1, 5)] script.py\n"
    assert (tmp_path / "rank-0.log").read_text() == ""


def test_whatever_a_rank_prints_is_in_its_log_even_if_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("earlier\n")
    with pytest.raises(RanksFailed, match="SIGKILL") as failed:
        run_ranks("launch_faults:speak", (), 1, log_dir=tmp_path)
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert lines == ["earlier", "from print", "from native code", "from stderr"]
    assert failed.value.text.splitlines() == lines


def test_it_works_outside_the_main_thread_and_polls_meanwhile(tmp_path: Path) -> None:
    found: list[object] = []
    polls: list[float] = []

    def launch() -> None:
        found.append(run_ranks("launch_faults:work", (), 2, log_dir=tmp_path, poll=lambda: polls.append(0.0)))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(30)
    assert found == [[1, 1]]
    assert polls


def test_a_fork_server_that_is_killed_takes_its_ranks_with_it_and_is_started_anew(tmp_path: Path) -> None:
    script = """
import os, time
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from shardlab.launch.ranks import RanksFailed, run_ranks
folder = Path.cwd()
def poll():
    if len(list(folder.glob("*.ready"))) == 2:
        os.kill(_forkserver._forkserver_pid, 9)
try:
    run_ranks("launch_faults:work", ("hold lock", 1, folder), 2, log_dir=folder, poll=poll)
except RanksFailed as failed:
    print(failed.reason.partition("before")[1:])
ranks = [Path("/proc") / ready.read_text() for ready in folder.glob("rank-*.ready")]
deadline = time.monotonic() + 3
while any(rank.exists() for rank in ranks) and time.monotonic() < deadline:
    time.sleep(0.02)
print([rank.exists() for rank in ranks])
print(run_ranks("launch_faults:answer", (0,), 1, log_dir=folder))
os.kill(_forkserver._forkserver_pid, 9)  # of no launch
print(run_ranks("launch_faults:answer", (0,), 1, log_dir=folder))
"""
    launcher = Launcher(WITH_TORCH + script, tmp_path)
    try:
        assert launcher.end(60) == 0, launcher.output
    finally:
        launcher.kill()
    said = ["('before', ' it had finished')", "[False, False]", "[(0, 0)]", "[(0, 0)]"]
    assert launcher.output.splitlines() == said


def test_an_error_of_the_launcher_itself_leaves_no_rank(tmp_path: Path) -> None:
    def poll() -> None:
        if len(list(tmp_path.glob("*.ready"))) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks("launch_faults:work", ("spin", 1, tmp_path), 2, log_dir=tmp_path, poll=poll)
    for ready in tmp_path.glob("rank-*.ready"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(ready.read_text()), 0)


def test_a_process_that_was_forked_after_a_launch_starts_a_server_of_its_own(tmp_path: Path) -> None:
    script = """
import multiprocessing
from pathlib import Path
from shardlab.launch.ranks import run_ranks
def launch():
    print(run_ranks("launch_faults:answer", (5,), 2, log_dir=Path.cwd()), flush=True)
launch()
child = multiprocessing.get_context("fork").Process(target=launch)
child.start()
child.join()
launch()
"""
    launcher = Launcher(LIGHT + script, tmp_path)
    assert launcher.end(60) == 0, launcher.output
    assert launcher.output == "[(0, 5), (1, 5)]\n" * 3
    assert launcher.left_after() == []


def test_a_long_path_of_the_temporary_folder_is_fine(tmp_path: Path) -> None:
    """The address of a socket holds 108 bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code = f"""
import os
os.environ["TMPDIR"] = {str(long)!r}
import tempfile
from pathlib import Path
from shardlab.launch.ranks import run_ranks
print(run_ranks("launch_faults:work", (), 2, log_dir=Path.cwd()), tempfile.gettempdir() == os.environ["TMPDIR"])
"""
    launcher = Launcher(WITH_TORCH + code, tmp_path)
    assert launcher.end(60) == 0, launcher.output
    assert launcher.output == "[1, 1] True\n"
