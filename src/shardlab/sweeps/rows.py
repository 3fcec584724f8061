"""How each job of a sweep ended: one line a change, appended to jobs.jsonl of the sweep's folder.

A line is written when a job begins and when it has ended, so whatever ends the launcher, the next one knows which
jobs are done and which were cut off. The last line of a job holds.
"""

import contextlib
import csv
import fcntl
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shardlab.config.objectives import goes_up

JOBS = "jobs.jsonl"
CSV = "sweep.csv"

STATUSES = ("running", "finished", "pruned", "failed", "refused", "killed")

DONE = ("finished", "pruned")
"""The statuses of a job that need not be run again."""


@dataclass(frozen=True)
class Row:
    """One job.

    number: its place in the sweep; what: the values that are its own; hash: of its config (see config/identity.py)
    status: running; finished or pruned; failed; refused (it can't be run); killed (interrupted, or its launcher was)
    objective: its values, one for each name of sweep.objective; [] where there are none
    seconds: from its start to its end; folder: of its run, inside the sweep's; "" if it never got one
    overrides: the words of it; time: when this row was written, unix seconds
    """

    number: int
    what: str
    hash: str
    status: str
    reason: str = ""
    objective: list[float] = field(default_factory=list)
    seconds: float = 0.0
    folder: str = ""
    overrides: list[str] = field(default_factory=list)
    time: float = 0.0


class Rows:
    """The rows of one sweep, on disk. Several threads and processes may write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOBS

    def write(self, row: Row) -> None:
        """Keep a row; it replaces the job's former one."""
        line = json.dumps({"event": "job", **asdict(row), "time": time.time()}, ensure_ascii=False) + "\n"
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # else one that cuts a torn line could cut another's new one
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())

    def read(self) -> list[Row]:
        """The row of each job that holds, by number."""
        found = {row.number: row for row in self._all()}
        return [found[number] for number in sorted(found)]

    def finished(self) -> dict[str, Row]:
        """The jobs that need not be run again, by hash: whatever was written of the same number later."""
        return {row.hash: row for row in self._all() if row.status == "finished"}

    def _all(self) -> Iterator[Row]:
        """Every whole row. A line that is damaged is left out: its job is run again."""
        with contextlib.suppress(FileNotFoundError):
            for line in self.path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                    yield _row(json.loads(line))


def _row(values: dict[str, Any]) -> Row:
    """Raises one of several errors where it isn't one."""
    row = Row(**{each.name: values[each.name] for each in fields(Row)})
    numbers = [row.number, row.seconds, row.time, *row.objective]
    if not all(isinstance(number, (int, float)) for number in numbers) or not isinstance(row.number, int):
        raise ValueError(row)
    if not all(isinstance(text, str) for text in (row.what, row.hash, row.status, row.reason, row.folder)):
        raise ValueError(row)
    return row


def best_rows(rows: list[Row], objectives: list[str]) -> list[Row]:
    """The finished jobs that no other beats: the first of the best, or for several objectives the Pareto front."""
    signs = [-1 if goes_up(name) else 1 for name in objectives]
    costs = {
        row.number: [sign * value for sign, value in zip(signs, row.objective, strict=True)]
        for row in rows
        if row.status == "finished" and len(row.objective) == len(objectives)
    }
    if len(objectives) == 1:
        least = min(costs, key=lambda number: costs[number], default=None)
        return [row for row in rows if row.number == least]

    def beats(a: list[float], b: list[float]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    front = {number for number, cost in costs.items() if not any(beats(other, cost) for other in costs.values())}
    return [row for row in rows if row.number in front]


def said_best(rows: list[Row], objectives: list[str]) -> str:
    """`best: job 7, val/loss 4.21, optimizer.lr=0.0123`, a line for each that no other beats; "" before any."""
    lines = []
    for row in best_rows(rows, objectives):
        values = ", ".join(f"{name} {value:.6g}" for name, value in zip(objectives, row.objective, strict=True))
        lines.append(f"best: job {row.number}, {values}, {row.what}")
    return "\n".join(lines)


def counts(rows: list[Row]) -> str:
    """How many of each status: "8 finished, 2 failed"."""
    return ", ".join(f"{count} {status}" for status, count in sorted(Counter(row.status for row in rows).items()))


def table(rows: list[Row], folder: Path, objectives: list[str]) -> str:
    """The end of a sweep for a person: how many of each status, a line for each job, and which was best."""
    head = ["job", "", "status", *objectives, "seconds", ""]
    cells = [
        [
            str(row.number),
            row.what,
            row.status,
            *[f"{row.objective[i]:.5g}" if row.objective else "-" for i in range(len(objectives))],
            f"{row.seconds:.1f}" if row.seconds else "-",
            row.reason,
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    lines = [f"sweep {folder}: {counts(rows)}"]
    for line in [head, *cells]:
        shown = [
            text.ljust(width) if column in (1, 2, len(head) - 1) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(shown)).rstrip())
    if best := said_best(rows, objectives):
        lines.append(best)
    return "\n".join(lines)


def write_csv(rows: list[Row], folder: Path, objectives: list[str]) -> None:
    """sweep.csv: a line a job, a column for each key that any job sets; whole or not at all."""
    keys = list(dict.fromkeys(word.partition("=")[0].lstrip("+") for row in rows for word in row.overrides))
    lines: list[dict[str, Any]] = []
    for row in rows:
        values = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in row.overrides}
        line: dict[str, Any] = {"job": row.number, "status": row.status}
        line |= {key: values.get(key, "") for key in keys}
        line |= dict(zip(objectives, row.objective, strict=False))
        lines.append(line | {"seconds": row.seconds, "folder": row.folder, "reason": row.reason})
    text = io.StringIO()
    columns = ["job", "status", *keys, *objectives, "seconds", "folder", "reason"]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    new = folder / f".{CSV}.{time.monotonic_ns()}"
    new.write_text(text.getvalue(), encoding="utf-8")
    new.rename(folder / CSV)
