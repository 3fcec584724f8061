"""The pulse of a rank: a count that goes up with every small piece of work, for the launcher to see that it lives.

Each rank counts in eight bytes of a file that all ranks of a launch and the launcher have mapped, so that a beat costs
a tenth of a microsecond and no system call. What the launcher makes of it: launch/hang.py.

Whoever waits for another rank does not beat: a silence that lasts is a hang of somebody.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

LAUNCHER_DECIDES = 1e7
"""Seconds, four months, that a collective may wait where the launcher watches: it sees more, so it decides first."""

FILE = "pulses"
"""The file's name in the folder of the launcher's watch."""


@dataclass(frozen=True)
class Pulse:
    """The count of a rank on another host, as its own launcher sees it."""

    count: int


_count: memoryview | None = None


def beat() -> None:
    """Say that a piece of work is done. Costs nothing worth mentioning; does nothing where nobody watches."""
    if _count is not None:
        _count[0] += 1


def set_up(file: Path, rank: int) -> None:
    """Let this process's beats be seen in a file that `make` has made, as those of a rank."""
    global _count
    _count = counts(file)[rank : rank + 1]
    beat()


def group_timeout(timeout: float) -> float:
    """Seconds that a collective may wait: as given, or for ever where a launcher watches."""
    return timeout if _count is None else LAUNCHER_DECIDES


def make(file: Path, ranks: int) -> None:
    """Make the file of as many ranks' counts. Written, not only sized: a full disk shows here and not at a beat."""
    file.write_bytes(bytes(8 * ranks))


def counts(file: Path) -> memoryview:
    """The counts of all ranks, by rank, as they are at each look."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")
