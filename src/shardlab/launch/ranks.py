"""Starting the ranks of a run, watching them, and ending them.

Every run gets fresh processes. They come from a fork server that has torch loaded: the first launch of a command
pays that import, a later one takes hundredths of a second. A process that is forked from the launcher itself would
inherit its threads and hang; one that is spawned would import torch anew each time.

One bad rank ends the others at once: they would only wait for it. Nothing is left running when `run_ranks` is
over, whatever ended it; and if the launcher is killed, each rank notices by itself (rank.py).
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from shardlab.launch.cause import Death, Failure, Lost, first_cause
from shardlab.launch.rank import Finished, Orders, live, nothing
from shardlab.launch.signals import Signals
from shardlab.training.place import Place

PRELOAD = ["shardlab.launch.server", "shardlab.launch.rank", "shardlab.training.loop", "torch._dynamo"]
"""What the fork server imports once for all ranks. A module that can't be imported there fails in the rank instead.

torch._dynamo: the first step of any torch optimizer imports it, which takes 1.5 s and more of each rank.
"""

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0
"""How long the launcher looks for the cause when all that it has heard is that a connection broke."""
SETTLE_SECONDS = 0.1
"""How long it looks for an earlier one when it has heard of a cause."""
TERM_SECONDS = 1.0
"""How long a rank may take to obey SIGTERM; then SIGKILL."""

LONGEST_FOR_SOCKETS = 70
"""Bytes of a temporary folder's path to which multiprocessing's names for a folder and a socket can be added."""

LOST_SECONDS = 0.5
"""How long a launcher of a job looks, when a signal comes, whether another launcher had gone before it."""

_starting = threading.RLock()


class Process(Protocol):
    """What run_ranks asks of a rank's process, as multiprocessing's have it."""

    @property
    def pid(self) -> int | None:
        """None if another launcher has started it: the number would mean nothing here."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that is ready once it has ended."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""

    def close(self) -> None:
        """Give back what it needed. It has ended."""


Pipe = Connection
"""What a rank says comes out of it: a Finished, a Failure, or of a rank of another launcher also a Lost."""

Start = Callable[[Place, Orders], "tuple[Process, Pipe[Any, Any]]"]
"""Starts one rank, which then lives as rank.live says."""


class RanksFailed(Exception):  # noqa: N818 - it says what happened
    """A rank failed, and the run with it.

    rank: the one that failed first; reason: one line that names it; text: its traceback, or the end of its log
    user_error: the message, if the rank raised ShardlabError: the user can mend it
    """

    def __init__(self, rank: int, reason: str, text: str, user_error: str | None = None) -> None:
        super().__init__(rank, reason, text, user_error)
        self.rank, self.reason, self.text, self.user_error = (rank, reason, text, user_error)

    def __str__(self) -> str:
        return self.reason


@dataclass
class _Crew:
    """The started ranks, by number, and what is known of each. elsewhere: those of other launchers."""

    processes: dict[int, Process] = field(default_factory=dict)
    pipes: "dict[int, Pipe[Any, Any]]" = field(default_factory=dict)
    finished: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    deaths: dict[int, Death] = field(default_factory=dict)
    elsewhere: set[int] = field(default_factory=set)


def run_ranks(
    function: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    ranks: int,
    *,
    log_dir: Path,
    poll: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    start: Start | None = None,
) -> list[Any]:
    """Call function(Place, *arguments) in `ranks` fresh processes and return what each returned, by rank.

    function: importable, itself or as "module:name" (the launcher then needn't import it)
    log_dir: what rank N prints goes to rank-N.log there
    poll: called in this thread about five times a second, once all ranks are started
    environment: set in the ranks on top of this process's own
    start: starts each rank, by default in a process of this host

    Raises RanksFailed with the first cause; KeyboardInterrupt or SystemExit(128 + signal) if a signal came.
    """
    orders = Orders(_reference(function), pickle.dumps(arguments), {**os.environ, **(environment or {})}, log_dir)
    crew = _Crew()
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="shardlab-", ignore_cleanup_errors=True) as meeting:
        try:
            wake_server(signals)
            with _without_main():
                for rank in range(ranks):
                    place = Place(rank, ranks, f"file://{meeting}/ranks")
                    crew.processes[rank], crew.pipes[rank] = (start or start_rank)(place, orders)
                    if crew.processes[rank].pid is None:
                        crew.elsewhere.add(rank)
            _watch(crew, signals, poll)
        finally:
            _end(crew)
    _check(crew, signals)  # one that came while the ranks were being ended
    if crew.failures or crew.deaths:
        raise _failed(crew, log_dir)
    return [crew.finished[rank] for rank in range(ranks)]


def _reference(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must stand at the top of a module that can be imported")
    return f"{function.__module__}:{function.__qualname__}"


def wake_server(signals: Signals) -> None:
    """Have the fork server running with everything imported. A signal ends the wait at once.

    It is a process that does nothing that is waited for, so that a signal leaves nothing half started; starting the
    real ranks then takes milliseconds each.
    """
    if multiprocessing.get_start_method(allow_none=True) not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("forkserver", force=True)  # in a worker of joblib it is one of joblib's own
    _choose_short_folder()
    for attempt, preload in enumerate((PRELOAD, PRELOAD, [])):
        multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
        resource_tracker.ensure_running()  # by itself it would unblock SIGINT below
        # Blocked signals are inherited: Ctrl-C then can't hit the server, nor a rank before it can ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            _ensure_server()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            with signals.raising(), _without_main():
                first = ForkServerProcess(target=nothing, daemon=True)
                first.start()
                first.join()
            return
        except (EOFError, OSError):
            # The server has been killed, or dies of an import: then the rank, without preloading, will report that.
            if attempt == 2:
                raise
            time.sleep(0.2)  # a process that is just dying still counts as running


def _ensure_server() -> None:
    """Have a fork server running that is this process's own: one that was forked from a user's inherits theirs."""
    try:
        forkserver.ensure_running()
    except ChildProcessError:
        server: Any = forkserver._forkserver
        os.close(server._forkserver_alive_fd)  # else it would outlive the process that it belongs to
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
        forkserver.ensure_running()


def _choose_short_folder() -> None:
    """Have the fork server's socket under /tmp where TMPDIR is too long for the address of one (108 bytes)."""
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) > LONGEST_FOR_SOCKETS:
        tempfile.tempdir = "/tmp"
        try:
            util.get_temp_dir()  # made once, and kept for the process's life
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the caller's main script: a fresh process would run it again as a module, guard or not."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def start_rank(place: Place, orders: Orders) -> "tuple[Process, Pipe[Any, Any]]":
    """Start one rank in a fresh process of this host. The fork server is awake."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = ForkServerProcess(target=live, args=(place, orders, sender), name=f"rank {place.rank}", daemon=True)
    try:
        with _without_main():
            process.start()
    finally:
        sender.close()
    return process, receiver


def _check(crew: _Crew, signals: Signals) -> None:
    """Raise the interruption if a signal has come, unless it followed from another launcher's end.

    torchrun ends all launchers of a host when one of them has gone: that one is the cause then, not the signal.
    """
    if signals.received is not None:
        deadline = time.monotonic() + LOST_SECONDS if crew.elsewhere else 0.0
        while not _has_lost(crew) and crew.pipes and (left := deadline - time.monotonic()) > 0:
            wait([*crew.pipes.values()], left)
            for rank in list(crew.pipes):
                _listen(crew, rank)
        if not _has_lost(crew):
            signals.check()


def _has_lost(crew: _Crew) -> bool:
    return any(isinstance(death, Lost) for death in crew.deaths.values())


def _watch(crew: _Crew, signals: Signals, poll: Callable[[], None]) -> None:
    """Return once every rank has ended, or soon after one has failed."""
    alive = set(crew.processes)
    next_poll = time.monotonic()
    deadline = float("inf")
    while alive and time.monotonic() < deadline:
        if (now := time.monotonic()) >= next_poll:
            poll()
            next_poll = now + POLL_SECONDS
        sentinels = [crew.processes[rank].sentinel for rank in alive]
        wait([*sentinels, *crew.pipes.values(), *signals.wakes], max(0.0, min(next_poll, deadline) - time.monotonic()))
        _check(crew, signals)
        for rank in list(crew.pipes):
            _listen(crew, rank)
        for rank in [rank for rank in alive if crew.processes[rank].exitcode is not None]:
            alive.remove(rank)
            _listen(crew, rank)  # its last word may have come after the look above
            if rank not in crew.finished and rank not in crew.failures and rank not in crew.deaths:
                crew.deaths[rank] = Death(time.monotonic(), crew.processes[rank].exitcode or 0)
        ends: list[Failure | Death] = [*crew.failures.values(), *crew.deaths.values()]
        if ends:
            echoes_only = all(end.echo for end in ends)
            deadline = min(deadline, time.monotonic() + (GRACE_SECONDS if echoes_only else SETTLE_SECONDS))
    if deadline < float("inf"):
        _check(crew, signals)  # a signal to the whole group may have ended the ranks before it woke us


def _listen(crew: _Crew, rank: int) -> None:
    """Take in what a rank has said, if anything; a rank speaks once."""
    pipe = crew.pipes.get(rank)
    if pipe is None or not pipe.poll():
        return
    try:
        said = pipe.recv()
    except (EOFError, OSError):  # it died without a word, or in the middle of one
        said = None
    if isinstance(said, Finished):
        crew.finished[rank] = said.result
    elif isinstance(said, Failure):
        crew.failures[rank] = said
    elif isinstance(said, Lost):
        crew.deaths[rank] = said
    crew.pipes.pop(rank).close()


def _end(crew: _Crew) -> None:
    """Leave no rank running."""
    running = [process for process in crew.processes.values() if process.exitcode is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + TERM_SECONDS
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in running:
        if process.exitcode is None:
            process.kill()
            process.join()
    for rank in crew.elsewhere:
        _listen(crew, rank)  # that its launcher is lost may show only now, after the others have failed of it
    for pipe in crew.pipes.values():
        pipe.close()
    crew.pipes.clear()
    for process in crew.processes.values():
        process.close()  # a rank whose fork server was killed counts as ended; it dies of this, see rank.py


def _failed(crew: _Crew, log_dir: Path) -> RanksFailed:
    rank, cause = first_cause(crew.failures, crew.deaths)
    if isinstance(cause, Failure):
        return RanksFailed(rank, f"rank {rank} raised {cause.summary}", cause.text, cause.user_error)
    return RanksFailed(rank, f"rank {rank} {cause.summary}", _last_lines(log_dir / f"rank-{rank}.log"))


def _last_lines(log: Path, lines: int = 20) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
