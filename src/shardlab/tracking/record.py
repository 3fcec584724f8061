"""The run record: what a run wrote down, and the truth about it.

Global rank 0 appends one JSON object a line to events.jsonl, the other ranks to rank-N.jsonl. A line is written whole
in one call, so a process that is killed leaves at most a torn last line: a writer cuts it, a reader skips it. A run
that was resumed carries on in the same file, and its `resume` event voids what came after its step.

Floats are written so that they read back bit for bit; infinities and NaN in Python's spelling (Infinity, NaN).
"""

import fcntl
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.errors import ShardlabError

Event = dict[str, Any]
"""One line: `event` (its kind), `time` (unix seconds), and the values."""

EVENTS = "events.jsonl"
PROVENANCE = "provenance.json"
LINK = "mlflow.json"
"""In the run's folder: which MLflow run, in which store, shows this run."""


class EventLog:
    """Appends events to a file; on opening, a torn last line is cut.

    While it is open the file is locked, shared with other writers: who finds it unlocked knows that nobody writes.
    alone: don't share. Raises BlockingIOError if somebody has it open.
    """

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        except BlockingIOError:
            os.close(self._file)
            raise
        except OSError:  # a file system without locks, where nobody is kept off
            pass
        os.ftruncate(self._file, _whole_bytes(path))

    def write(self, event: str, **values: object) -> None:
        """Append one line; once this returns, only the machine's own death can lose it."""
        line = json.dumps({"event": event, "time": time.time(), **values}, default=_plain, ensure_ascii=False) + "\n"
        rest = line.encode()
        while rest:  # a file system may take a part of it
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


class Tail:
    """Reads a growing file of events: each call yields the whole lines that have come since the last.

    The file need not exist yet. It must only grow; that a writer cuts a torn last line does no harm.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._line = 0

    def events(self) -> Iterator[Event]:
        """The new events. Raises ShardlabError at a whole line that is no event."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        for line in new[: new.rfind(b"\n") + 1].splitlines(keepends=True):
            self._offset += len(line)
            self._line += 1
            try:
                event = json.loads(line)
                event["event"], event["time"]
            except (ValueError, TypeError, KeyError):
                raise ShardlabError(f"{self.path} line {self._line} is not an event of a run") from None
            yield event


def _whole_bytes(path: Path) -> int:
    """Size of the file without a torn last line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            start = max(0, size - 65536)
            file.seek(start)
            end = file.read(size - start).rfind(b"\n")
            if end >= 0:
                return start + end + 1
            size = start
    return 0


def _plain(value: object) -> object:
    """What JSON has no word for: paths, and the numbers of numpy and torch."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} can't be written to the run record")


def read_events(path: Path) -> list[Event]:
    """The events that hold, in the order of writing; [] if there is no file.

    A `resume` event voids earlier events with a later step, and any earlier end (being pruned is one). Of events of
    one kind at one step (and split, and rank) the last holds.
    """
    holding: dict[tuple[object, ...], Event] = {}
    for event in Tail(path).events():
        if event["event"] == "resume":
            holding = {
                key: before
                for key, before in holding.items()
                if before["event"] not in ("end", "pruned") and before.get("step", 0) <= event["step"]
            }
        key = (event["event"], event.get("split"), event.get("step"), event.get("rank"))
        holding.pop(key, None)
        holding[key] = event
    return list(holding.values())


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its folder; `load` reads it anew.

    id: 32 hex digits; name: such as "tiny-ddp2-s1"
    config: the config as plain values; provenance: how, where and from what it ran
    events: those of events.jsonl that hold; ranks: the `rank` event of each rank that wrote one, by rank
    """

    folder: Path
    id: str
    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    events: list[Event]
    ranks: list[Event]

    @classmethod
    def load(cls, folder: Path) -> "RunRecord":
        """Read a run's folder. Raises ShardlabError if it holds none."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        provenance = read_provenance(folder)
        try:
            config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        except (OSError, ValueError, YAMLError, OmegaConfBaseException):
            config = None
        if provenance is None or not isinstance(config, dict):
            raise ShardlabError(f"{folder} holds no run: {PROVENANCE} and config.yaml, both whole, are needed")
        events = read_events(folder / EVENTS)
        others = [event for path in folder.glob("rank-*.jsonl") for event in read_events(path)]
        ranks = {event["rank"]: event for event in [*events, *others] if event["event"] == "rank"}
        return cls(
            folder=folder,
            id=provenance["id"],
            name=provenance["name"],
            config={str(key): value for key, value in config.items()},
            provenance=provenance,
            events=events,
            ranks=[ranks[rank] for rank in sorted(ranks)],
        )

    def _last(self, event: str) -> Event:
        return next((found for found in reversed(self.events) if found["event"] == event), {})

    @property
    def status(self) -> str:
        """FINISHED, FAILED or KILLED; RUNNING while no end is written (the launcher may have been killed)."""
        return str(self._last("end").get("status", "RUNNING"))

    @property
    def reason(self) -> str | None:
        """Why it ended, unless it finished."""
        return self._last("end").get("reason")

    @property
    def start(self) -> Event:
        """What was known before the first step; {} if the run never got there."""
        return self._last("start")

    @property
    def steps(self) -> list[Event]:
        """The `step` events, one a step."""
        return [event for event in self.events if event["event"] == "step"]

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [event["loss"] for event in self.steps]

    def evals(self, split: str) -> list[Event]:
        """The evaluations of a split, in order."""
        return [event for event in self.events if event["event"] == "eval" and event["split"] == split]

    @property
    def best(self) -> Event | None:
        """Step and validation loss of the best model; None before the first evaluation."""
        return self._last("best") or None

    @property
    def peak_memory(self) -> dict[int, int]:
        """Bytes at the highest point, by rank."""
        return {event["rank"]: event["peak_memory"] for event in self.ranks if "peak_memory" in event}

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the steps; of five and more, the first two don't count (they pay for warming up)."""
        steps = self.steps[2:] if len(self.steps) >= 5 else self.steps
        rates = [event["tokens"] / event["seconds"] for event in steps if event.get("seconds")]
        return statistics.median(rates) if rates else None

    @property
    def pruned(self) -> int | None:
        """The step after which a sweeper ended the run early; None if it didn't."""
        return self._last("pruned").get("step")

    def value(self, name: str) -> float | None:
        """An objective's value, see config/objectives.py; None if the run hasn't got as far.

        Evaluations that gave NaN don't count unless all did. Raises KeyError for a name that is no objective.
        """
        from shardlab.config.objectives import goes_up

        more_is_better = goes_up(name)
        if name == "train/loss":
            return float(self.losses[-1]) if self.losses else None
        if name == "perf/tokens_per_s":
            return self.tokens_per_s
        if name == "perf/peak_memory":
            return float(max(self.peak_memory.values())) if self.peak_memory else None
        split, _, key = name.partition("/")
        values = [float(event[key]) for event in self.evals(split) if key in event]
        numbers = [value for value in values if not math.isnan(value)] or values
        return (max if more_is_better else min)(numbers, default=None)


def find_run(text: str, root: Path = Path("runs")) -> Path:
    """The folder of a run that the user names: its folder, `last`, its id or MLflow's or the start of one, or its name.

    root: where run folders are looked for, at any depth
    Raises ShardlabError if there is none, or more than one.
    """
    if (Path(text) / PROVENANCE).is_file():
        return Path(text)
    runs = _runs_below(root)
    if not runs:
        raise ShardlabError(f"no run {text!r}: {root.absolute()} holds no runs; give the run's folder")
    if text == "last":
        return max(runs, key=lambda folder: float(runs[folder]["started"]))
    found = [folder for folder, run in runs.items() if text in (run["id"], run["name"])]
    found = found or [
        folder for folder, run in runs.items() if run["id"].startswith(text) or _mlflow_id(folder).startswith(text)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ShardlabError(f"no run {text!r} in {root}; a RUN is its id or the start of it, its name, folder, or last")
    latest = sorted(found, key=lambda folder: float(runs[folder]["started"]), reverse=True)
    shown = ", ".join(f"{runs[folder]['id'][:8]} ({folder})" for folder in latest[:5])
    more = ", ..." if len(found) > 5 else ""
    raise ShardlabError(
        f"{len(found)} runs in {root} are called {text!r}; give an id or a folder, the latest first: {shown}{more}"
    )


def read_link(folder: Path) -> dict[str, str] | None:
    """What a run's mlflow.json says: uri, experiment, experiment_id, run_id. None if there is none that is whole."""
    try:
        link = json.loads((folder / LINK).read_text(encoding="utf-8"))
        if all(isinstance(link[key], str) for key in ("uri", "experiment", "experiment_id", "run_id")):
            return dict(link)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def _mlflow_id(folder: Path) -> str:
    """The id under which MLflow shows a run; a word that no id starts with, where it doesn't."""
    return (read_link(folder) or {"run_id": "-"})["run_id"]


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What a run's provenance.json says; None if there is none that is a run's and whole."""
    try:
        about = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        if all(isinstance(about[key], kind) for key, kind in (("id", str), ("name", str), ("started", (int, float)))):
            return dict(about)
    except (OSError, ValueError, TypeError, KeyError):  # its launcher was killed in the first moment, or not ours
        pass
    return None


def _runs_below(root: Path) -> dict[Path, dict[str, Any]]:
    """Provenance of the runs below a folder, by folder. A run's folder holds no other runs."""
    runs = {}
    for at, folders, files in os.walk(root):
        if PROVENANCE in files and (about := read_provenance(Path(at))) is not None:
            folders.clear()
            runs[Path(at)] = about
    return runs
