"""Signals while a run is alive: noted first, acted on where nothing can be left half done.

An exception raised by a signal handler strikes between any two bytecodes: in the middle of starting a rank, or of
ending the others. So Ctrl-C, SIGTERM and SIGHUP are only noted here, and wake whoever waits; the launcher turns
them into an exception at a place of its choice. A second Ctrl-C during the clean-up is noted as well.

Python runs handlers in the main thread alone. So the outermost `Signals` of the main thread notes for all: those that
are entered within it, and those of other threads, share what it has noted. One Ctrl-C ends every run of a sweep.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Noted:
    """What has come since the outermost Signals was entered.

    users: how many Signals look at it; the last closes the pipe, from which nobody ever reads: it stays readable
    raises: a signal raises at once, in the main thread
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0
        self.raises = False
        self.users = 0
        self.pipe: tuple[int, int] | None = None
        self._previous: dict[int, Any] = {}

    def begin(self) -> None:
        self.pipe = os.pipe()
        for end in self.pipe:
            os.set_blocking(end, False)
        for number in HANDLED:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._note)

    def end(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def close(self) -> None:
        if self.pipe is not None:
            for end in self.pipe:
                os.close(end)
            self.pipe = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        self.count += 1
        if self.pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self.pipe[1], b"!")
        if self.raises:
            self.raises = False
            raise self.interruption()

    def interruption(self) -> BaseException:
        if self.received in (None, signal.SIGINT):
            return KeyboardInterrupt()
        return SystemExit(128 + int(self.received or 0))


_outermost: _Noted | None = None
_lock = threading.Lock()
"""Held where `_outermost` and the number of its users change: a pipe must not close under a thread that adopts it."""


class Signals:
    """A context in which the handled signals are noted, and after which the handlers are as before.

    stop: of this piece of work, if another thread may end it

    A signal that the caller ignores (nohup, a shell's background job) stays ignored. In another thread than the main
    one it adopts what the main thread's outermost one notes; where there is none, only `stop` can come.
    """

    def __init__(self, stop: "Stop | None" = None) -> None:
        self._stop = stop
        self._noted = _Noted()
        self._is_outermost = False
        self._outer_raises = False

    def __enter__(self) -> Self:
        global _outermost
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and _outermost is not None:  # a place that raises ends here
            self._outer_raises, _outermost.raises = _outermost.raises, False
        with _lock:
            if _outermost is not None:
                self._noted = _outermost
            elif in_main:
                self._is_outermost = True
                self._noted.begin()
                _outermost = self._noted
            self._noted.users += 1
        return self

    def __exit__(self, *_: object) -> None:
        global _outermost
        with _lock:
            if self._is_outermost:
                self._noted.end()
                _outermost = None
            self._noted.users -= 1
            if self._noted.users == 0:
                self._noted.close()
        if self._outer_raises:
            self._noted.raises = True

    @property
    def received(self) -> int | None:
        """The first signal that came."""
        return self._noted.received

    @property
    def count(self) -> int:
        """How many came."""
        return self._noted.count

    @property
    def wakes(self) -> list[int]:
        """File descriptors of which one becomes readable, and stays so, when a signal has come or the stop is pulled.

        Only while the context is entered.
        """
        pipe, stop = self._noted.pipe, self._stop
        return [*([] if pipe is None else [pipe[0]]), *([] if stop is None else [stop.wakes])]

    def check(self) -> None:
        """Raise what has come, if anything.

        KeyboardInterrupt, or SystemExit with 128 + the signal's number, for a signal; Stopped for a pulled stop.
        """
        if self.received is not None:
            raise self._noted.interruption()
        if self._stop is not None and self._stop.reason is not None:
            raise Stopped(self._stop.reason)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a signal raises at once: for long work that leaves nothing behind when it is cut off.

        Nothing can be raised in another thread than the main one: there it is looked before and after.
        """
        if threading.current_thread() is not threading.main_thread():
            self.check()
            yield
            self.check()
            return
        self._noted.raises = True
        try:
            self.check()
            yield
        finally:
            self._noted.raises = False


class Stopped(BaseException):
    """Another thread has pulled the Stop of this one's work. reason: why, in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Stop:
    """Ends one piece of work from another thread: pulled once, noticed where the work looks.

    reason: why it was pulled; None before
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._pipe = os.pipe()

    def pull(self, reason: str) -> None:
        """Have the work end; a second pull changes nothing."""
        if self.reason is None:
            self.reason = reason
            os.write(self._pipe[1], b"!")

    @property
    def wakes(self) -> int:
        """A file descriptor that becomes readable, and stays so, once it is pulled."""
        return self._pipe[0]

    def __del__(self) -> None:
        for end in self._pipe:
            with contextlib.suppress(OSError):
                os.close(end)
