"""Standard streams that are closed or can't be written: they cost what they would have shown, not the run.

A closed stream's number goes to the next file that is opened, such as the run's record, which would then get what
native code prints. So the launcher opens the null device in its place before it opens anything else.
"""

import contextlib
import os
import sys
from typing import TextIO


def open_missing() -> None:
    """Open the null device for each of the standard streams that the process was started without."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process


def tell(text: str, stream: TextIO) -> None:
    """Print a line at once; where nobody can read it, give the stream up."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        give_up(stream)


def give_up(stream: TextIO) -> None:
    """Let what waits to be written, and all that follows, go nowhere: the flush at exit must not fail either."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
