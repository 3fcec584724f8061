"""A rank's side of a launch: the first and the last thing that its process does.

It must end when the launcher does, however that went; its output belongs to its own log; and it leaves by os._exit,
because torch 2.13 with gloo can hang for ever when a DDP model is freed after its process group (see ranks.py).
This module imports no torch: the fork server has it already, or the function brings it.
"""

import contextlib
import faulthandler
import fcntl
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shardlab.launch.cause import describe_failure
from shardlab.launch.stacks import stack_file, tell_on_request
from shardlab.training import ask, pulse
from shardlab.training.place import Place


@dataclass(frozen=True)
class Finished:
    """What a rank's function returned."""

    result: Any


@dataclass(frozen=True)
class Orders:
    """What the launcher tells every rank of a run.

    function: "module:name", imported in the rank; arguments: pickled, opened in the rank, where a failure is reported
    environment: the whole of it; the fork server's own is as old as the server
    cores: the only ones that the rank may use; None for all
    watched: the folder of the launcher's watch over pulses and stacks; None where nobody watches
    asks: the launcher wants to be asked after each evaluation whether the run is to end
    """

    function: str
    arguments: bytes
    environment: dict[str, str]
    log_dir: Path
    cores: tuple[int, ...] | None = None
    watched: Path | None = None
    asks: bool = False


def nothing() -> None:
    """A process that ends at once: when it has, the fork server is awake."""


def live(place: Place, orders: Orders, launcher: "Connection[Any, Any]") -> None:
    """Be the rank; never returns. Sends Finished or Failure before any connection to another rank closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher answers for it
    code = 0
    try:
        if orders.cores is not None:  # before there is any other thread
            os.sched_setaffinity(0, orders.cores)
        _end_with_launcher()
        _write_to(orders.log_dir / f"rank-{place.rank}.log")
        if orders.watched is not None:
            tell_on_request(stack_file(orders.watched, place.rank))
            pulse.set_up(orders.watched / pulse.FILE, place.rank)
        if orders.asks:
            ask.set_up(launcher)
        os.environ.clear()
        os.environ.update(orders.environment)
        module, _, name = orders.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        try:
            # Bytes of our own launcher, through its pipe to this process; nothing that was ever in a file.
            result = function(place, *pickle.loads(orders.arguments))
        except SystemExit as leaving:  # whatever its code: the function has not come to its end
            raise RuntimeError(f"exit was called with {leaving.code!r}") from leaving
        launcher.send(Finished(result))
    except BaseException as error:
        # `kept` holds the traceback and with it every object of the failed step until the process is gone.
        kept = error
        code = 1
        failure = describe_failure(kept, time.monotonic())
        with contextlib.suppress(OSError):
            launcher.send(failure)
        print(failure.text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    """Die when the launcher does, however it died.

    The kernel sends SIGIO, which terminates, once the launcher's end of a pipe is closed: that reaches a rank whose
    native code never gives up Python's lock. The thread covers systems without it, and a launcher already gone.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def _write_to(log: Path) -> None:
    """Send everything that this process prints, native code included, to its log, line by line."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    if file > 2:  # it is one of them where the process was started without
        os.close(file)
    # Fresh objects: the fork server's own may hold text that it has not written yet.
    for name, stream in ("stdout", 1), ("stderr", 2):
        text = os.fdopen(stream, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, text)
    faulthandler.enable(sys.stderr)
