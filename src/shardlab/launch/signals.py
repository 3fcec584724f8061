"""Signals while a run is alive: noted first, acted on where nothing can be left half done.

An exception raised by a signal handler strikes between any two bytecodes: in the middle of starting a rank, or of
ending the others. So Ctrl-C, SIGTERM and SIGHUP are only noted here, and wake whoever waits; the launcher turns
them into an exception at a place of its choice. A second Ctrl-C during the clean-up is noted as well.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context in which the handled signals are noted, and after which the handlers are as before.

    received: the first signal that came; count: how many came

    A signal that the caller ignores (nohup, a shell's background job) stays ignored. Outside the main thread
    Python allows no handlers, so nothing is changed there.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0
        self._raises = False
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            for number in HANDLED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        self.count += 1
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], b"!")
        if self._raises:
            self._raises = False
            raise self.interruption()

    @property
    def wakes(self) -> list[int]:
        """File descriptors that become readable when a signal has come: one, or none outside the main thread."""
        return [] if self._pipe is None else [self._pipe[0]]

    def interruption(self) -> BaseException:
        """What the received signal means to the caller: KeyboardInterrupt, or SystemExit with 128 + its number."""
        if self.received in (None, signal.SIGINT):
            return KeyboardInterrupt()
        return SystemExit(128 + int(self.received or 0))

    def check(self) -> None:
        """Raise the interruption if a signal has come."""
        if self.received is not None:
            raise self.interruption()

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a signal raises at once: for long work that leaves nothing behind when it is cut off."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False


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
