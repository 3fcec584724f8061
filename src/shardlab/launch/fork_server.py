"""The fork server: the process that has torch loaded, and from which every rank is forked.

The first launch of a command pays that import, a later one takes hundredths of a second. A process that is forked
from the launcher itself would inherit its threads and hang; one that is spawned would import torch anew each time.

Several threads may launch at once: one at a time wakes the server.
"""

import io
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing import process as processes
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from typing import Any, Protocol

from shardlab.launch.rank import Orders, live, nothing
from shardlab.launch.signals import Signals
from shardlab.training.place import Place

PRELOAD = ["shardlab.launch.server", "shardlab.launch.rank", "shardlab.training.loop", "torch._dynamo"]
"""What the fork server imports once for all ranks. A module that can't be imported there fails in the rank instead.

torch._dynamo: the first step of any torch optimizer imports it, which takes 1.5 s and more of each rank.
"""

LONGEST_FOR_SOCKETS = 70
"""Bytes of a temporary folder's path to which multiprocessing's names for a folder and a socket can be added."""

_waking = threading.Lock()
_starting = threading.Lock()


class Process(Protocol):
    """A started rank, as the launcher sees it: the part of multiprocessing's own that it needs."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the rank has ended."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs; its exit status, or minus the signal that ended it."""

    @property
    def pid(self) -> int | None:
        """Its number on its machine."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, or as many seconds."""

    def close(self) -> None:
        """Forget a rank that has ended."""


class Pipe(Protocol):
    """The launcher's end of what connects it with a rank."""

    def poll(self) -> bool:
        """Whether there is something to receive, an end included."""

    def recv(self) -> Any:
        """What the rank has said. Raises EOFError or OSError if there will be nothing more."""

    def send(self, obj: Any) -> None:
        """Tell the rank something. Raises OSError if it has gone."""

    def close(self) -> None:
        """Hear no more."""

    def fileno(self) -> int:
        """A file descriptor that becomes readable when `poll` would be true."""


Start = Callable[[Place, Orders], tuple[Process, Pipe]]
"""How a rank is started."""


class _Popen(popen_forkserver.Popen):
    """As multiprocessing's own, except that a fresh process does not run the caller's main script as a module.

    It would, guard or not, and hiding `__main__` in the meantime would hide it from the launcher's other threads.
    """

    _fds: list[int]

    def _launch(self, process_obj: processes.BaseProcess) -> None:
        told = spawn.get_preparation_data(process_obj.name)
        told = {key: value for key, value in told.items() if not key.startswith("init_main")}
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(told, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        self.sentinel, writer = forkserver.connect_to_new_process(self._fds)
        # The second end of the pipe stays open for as long as this process lives: a rank ends with it.
        self.finalizer = util.Finalize(self, _close, (os.dup(writer), self.sentinel))
        with open(writer, "wb") as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: processes.BaseProcess) -> _Popen:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


def start(place: Place, orders: Orders) -> tuple[Process, Pipe]:
    """Start a rank on this machine, and return it with the pipe to it. The server must be awake."""
    ours, its = multiprocessing.Pipe()
    process = _Process(target=live, args=(place, orders, its), name=f"rank {place.rank}", daemon=True)
    try:
        _start(process)
    finally:
        its.close()
    return process, ours


def _start(process: _Process) -> None:
    """Start a process that this module's users alone look after.

    multiprocessing looks at all its processes whenever it starts one: in two threads at once, both could read the
    end of the same one, and one of them would get it wrong.
    """
    with _starting:
        process.start()
        vars(processes)["_children"].discard(process)


def wake(signals: Signals) -> None:
    """Have the fork server running with everything imported. What `signals` notes ends the wait at once.

    It is a process that does nothing that is waited for, so that an interruption leaves nothing half started;
    starting the real ranks then takes milliseconds each.
    """
    while not _waking.acquire(timeout=0.1):
        signals.check()
    try:
        _wake(signals)
    finally:
        _waking.release()


def _wake(signals: Signals) -> None:
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
            _start_nothing(signals)
            return
        except (EOFError, OSError):
            # The server has been killed, or dies of an import: then the rank, without preloading, will report that.
            if attempt == 2:
                raise
            time.sleep(0.2)  # a process that is just dying still counts as running


def _start_nothing(signals: Signals) -> None:
    """Have a process come and go. Starting it takes as long as the server's imports, so another thread does it."""
    done, doing = os.pipe()
    problems: list[Exception] = []

    def come_and_go() -> None:
        try:
            first = _Process(target=nothing, daemon=True)
            _start(first)
            first.join()
            first.close()
        except Exception as error:
            problems.append(error)
        finally:
            os.close(doing)

    threading.Thread(target=come_and_go, name="fork server", daemon=True).start()
    try:
        signals.check()
        wait([done, *signals.wakes])
        signals.check()
    finally:
        os.close(done)
    if problems:
        raise problems[0]


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
    """Have the fork server's socket under /tmp where TMPDIR is too long for the address of one (108 bytes).

    Another thread that makes a temporary folder in this moment finds it there too, which does no harm.
    """
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) > LONGEST_FOR_SOCKETS:
        tempfile.tempdir = "/tmp"
        try:
            util.get_temp_dir()  # made once, and kept for the process's life
        finally:
            tempfile.tempdir = before
