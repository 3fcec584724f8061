"""What a sweep shows while it goes on: a table that stays at the foot of a terminal, or lines elsewhere.

The table is drawn by a thread of its own from what the jobs' threads tell it and from the run records, which it
reads as everybody else does.
"""

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from shardlab.errors import ShardlabError
from shardlab.launch.streams import tell
from shardlab.sweeps.rows import Row, best_rows, said_best
from shardlab.tracking.record import EVENTS, Event, Tail

if TYPE_CHECKING:
    from rich.console import Group

REDRAWS_PER_SECOND = 4


class Live(Protocol):
    """What the jobs tell. shows_progress: the runs need not show their own."""

    shows_progress: bool

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def know(self, rows: list[Row]) -> None:
        """There are these rows of an earlier call, of which the best may be one."""

    def began(self, row: Row, folder: Path) -> None:
        """A job has begun, in this folder."""

    def ended(self, row: Row, again: bool = True) -> None:
        """A job has ended. again: it ran now, rather than in an earlier call."""


def live(total: int | None, objectives: tuple[str, ...]) -> Live:
    """The table if standard error is a terminal, else lines. total: the number of jobs, if it is known."""
    return LiveTable(total, objectives) if sys.stderr.isatty() else Lines(objectives)


class Lines:
    """A line when a job begins and one when it has ended."""

    shows_progress = False

    def __init__(self, objectives: tuple[str, ...]) -> None:
        self._best = BestSoFar(objectives)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def know(self, rows: list[Row]) -> None:
        """See Live."""
        self._best.add(*rows)

    def began(self, row: Row, folder: Path) -> None:
        """See Live."""
        tell(f"job {row.number}: {row.what}", sys.stdout)

    def ended(self, row: Row, again: bool = True) -> None:
        """See Live."""
        self._best.add(row)
        stream = sys.stdout if row.status in ("finished", "pruned") else sys.stderr
        tell(said(row, self._best, again), stream)


class BestSoFar:
    """The jobs that no other beats yet. objectives: names of their values; rows: of those jobs; text: about them"""

    def __init__(self, objectives: tuple[str, ...]) -> None:
        self.objectives = list(objectives)
        self.rows: list[Row] = []
        self.text = ""
        self._lock = threading.Lock()

    def add(self, *rows: Row) -> None:
        """Take in jobs that have ended. Whoever was beaten is forgotten, so this stays cheap."""
        with self._lock:
            known = {row.number: row for row in (*self.rows, *rows)}
            self.rows = best_rows([known[number] for number in sorted(known)], self.objectives)
            self.text = said_best(self.rows, self.objectives)


def said(row: Row, best_so_far: BestSoFar, again: bool) -> str:
    """One line for a job that has ended, with the best so far."""
    line = f"job {row.number} {row.status}"
    if not again:
        line += " by an earlier call"
    if row.objective:
        named = zip(best_so_far.objectives, row.objective, strict=True)
        line += ", " + ", ".join(f"{name} {value:.5g}" for name, value in named)
    if row.reason:
        line += f": {row.reason}"
    best = [each.number for each in best_so_far.rows]
    if best and again and row.status == "finished":
        line += "; the best so far" if row.number in best else f"; best so far: job {', '.join(map(str, best))}"
    return line


class LiveTable:
    """A table of the jobs that run, with counts and the best so far; lines of what has ended go above it."""

    shows_progress = True

    def __init__(self, total: int | None, objectives: tuple[str, ...]) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._total, self._best = total, BestSoFar(objectives)
        self._ended: Counter[str] = Counter()
        self._running: dict[int, _Running] = {}
        self._lock = threading.Lock()
        self._live = RichLive(
            get_renderable=self._drawn,
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # else what goes to a file would land on the terminal
            refresh_per_second=REDRAWS_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def know(self, rows: list[Row]) -> None:
        """See Live."""
        self._best.add(*rows)

    def began(self, row: Row, folder: Path) -> None:
        """See Live."""
        with self._lock:
            self._running[row.number] = _Running(row, folder)

    def ended(self, row: Row, again: bool = True) -> None:
        """See Live."""
        with self._lock:
            self._running.pop(row.number, None)
            self._ended[row.status] += 1
        self._best.add(row)
        line = said(row, self._best, again)
        tell(f"{line}   {row.what}", sys.stderr)

    def _drawn(self) -> "Group":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            running = [self._running[number] for number in sorted(self._running)]
            counts = dict(self._ended)
        total = "" if self._total is None else f" of {self._total}"
        words = [f"{len(running)} running", *(f"{count} {status}" for status, count in sorted(counts.items()))]
        head = f"{sum(counts.values())}{total} jobs ended: {', '.join(words)}"
        if self._best.text:
            head += f"\n{self._best.text}"
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("job", "", "step", "loss", self._best.objectives[0], "seconds"):
            table.add_column(column, justify="left" if not column else "right", overflow="fold")
        for job in running:
            table.add_row(*(Text(cell) for cell in job.cells(self._best.objectives[0])))
        return Group(Text(head), table) if running else Group(Text(head))


class _Running:
    """A job that runs, followed by its record."""

    def __init__(self, row: Row, folder: Path) -> None:
        self._row = row
        self._tail = Tail(folder / EVENTS)
        self._started = time.monotonic()
        self._last: dict[str, Event] = {}

    def cells(self, objective: str) -> list[str]:
        """The row of the table. objective: val/... is shown of the last evaluation."""
        try:
            for event in self._tail.events():
                self._last[event["event"]] = event
        except (OSError, ShardlabError):
            pass
        step, start, evaluated = (self._last.get(kind, {}) for kind in ("step", "start", "eval"))
        value = evaluated.get(objective.removeprefix("val/")) if evaluated.get("split") == "val" else None
        return [
            str(self._row.number),
            self._row.what,
            f"{step['step']}/{start.get('total_steps')}" if step else "-",
            f"{step['loss']:.4g}" if step else "-",
            "-" if value is None else f"{value:.5g}",
            f"{time.monotonic() - self._started:.0f}",
        ]
