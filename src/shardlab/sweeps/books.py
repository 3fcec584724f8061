"""A sweep's books: who runs it, what is done of it, and its parent run in MLflow.

A sweep is known again by its space: the words of the command that say what is to be run. Its folder belongs to one
launcher at a time, by a lock that dies with that launcher; whoever comes next settles what it has left and goes on.
The parent run is made by the first job's background thread, so a sweep starts as fast as a run and a dead server does
not stop it.
"""

import fcntl
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlab.errors import ShardlabError
from shardlab.launch.streams import tell
from shardlab.sweeps.outcome import of_record
from shardlab.sweeps.rows import DONE, STATUSES, Row, Rows, best_rows, write_csv
from shardlab.tracking.mlflow_sink import is_shipped, patience
from shardlab.tracking.provenance import without_credentials
from shardlab.tracking.record import PROVENANCE, RunRecord
from shardlab.tracking.settle import settle_run
from shardlab.tracking.store import problem
from shardlab.tracking.sweep_parent import SWEEP, begin_sweep, end_sweep, read_sweep, ship_sweep

ROOT = Path("runs/sweeps")
"""Where conf/config.yaml has the folders of sweeps that are not told another."""

MULTIRUN = "multirun.yaml"
"""What Hydra's sweepers write into a sweep's folder."""

LOCK = "sweep.lock"
"""Held by the launcher that runs the sweep."""

IGNORED = (
    "sweep.parallel",
    "sweep.fail_fast",
    "runtime.timeout",
    "hydra.sweep.dir",
    "hydra.launcher.",
    "hydra/launcher",
    "hydra.sweeper.n_trials",
)
"""What the keys of words begin with that change how a sweep is run, but not what."""


def space_of(overrides: Sequence[str], config_name: str | None, config_dir: str | None) -> tuple[str, ...]:
    """The words that tell one sweep from another."""
    words = [word for word in overrides if not word.lstrip("+").startswith(IGNORED)]
    flags = [f"--config-name={config_name}"] if config_name else []
    flags += [f"--config-dir={Path(config_dir).absolute()}"] if config_dir else []
    return tuple(without_credentials(word) for word in [*flags, *words])


def earlier_sweeps(space: Sequence[str], root: Path = ROOT) -> Iterator[Path]:
    """The folders of the sweeps of that space, the latest first."""
    for folder in sorted((path.parent for path in root.glob(f"*/*/{SWEEP}")), reverse=True):
        if _space(folder) == list(space):
            yield folder


def _space(folder: Path) -> list[str] | None:
    try:
        about = read_sweep(folder)
        return list(about["space"]) if about["id"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def about_sweep(command: Sequence[str], space: Sequence[str], varied: Sequence[str] = ()) -> dict[str, Any]:
    """What is known of a sweep before it begins, as plain values: see tracking/sweep_parent.py.

    varied: the words of the space that take several values; they are its name
    """
    return {
        "id": uuid.uuid4().hex,
        "name": without_credentials(f"sweep {' '.join(varied or space)}")[:200],
        "command": [without_credentials(word) for word in command],
        "space": list(space),
    }


class SweepRunsError(ShardlabError):
    """Another command runs the sweep of that folder."""


class Sweep:
    """One sweep. folder: holds the folders of its jobs, absolute; rows: of its jobs; begun: it has been written down"""

    def __init__(self, folder: Path, about: dict[str, Any], objectives: Sequence[str]) -> None:
        """about: see `about_sweep`; objectives: the names of a job's values."""
        self.folder = folder.absolute()
        self.rows = Rows(self.folder)
        self.begun = False
        self._about = about
        self._objectives = list(objectives)
        self._lock: int | None = None
        self._beginning = threading.Lock()

    def claim(self) -> None:
        """Make the folder and hold it until `release`.

        Raises ShardlabError if it holds another sweep or can't be made, SweepRunsError if another command holds it.
        """
        where = f"hydra.sweep.dir={self.folder}"
        if (self.folder / SWEEP).exists() and (space := _space(self.folder)) != self._about["space"]:
            holds = "already holds another sweep" if space is not None else f"holds a {SWEEP} that can't be read"
            raise ShardlabError(f"{where} {holds}; give another folder, or none for a new one")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ShardlabError(f"{where} can't be written: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise SweepRunsError(f"{where} is being run by another command; give another folder") from None
        self._lock = lock
        self._about["id"] = read_sweep(self.folder).get("id", self._about["id"])

    def release(self) -> None:
        """Give the folder up; of a sweep that never began, leave nothing of ours in it."""
        if self._lock is not None:
            if not (self.folder / SWEEP).exists():
                (self.folder / LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def resume(self) -> list[Row]:
        """The rows of an earlier call, after those that it was cut off in have been settled by their records."""
        for row in self.rows.read():
            if row.status == "running":
                self.rows.write(self._settled(row))
        return self.rows.read()

    def _settled(self, row: Row) -> Row:
        folder = self.folder / row.folder
        with suppress(ShardlabError, OSError):
            settle_run(folder)
            return of_record(row, RunRecord.load(folder), self._objectives)
        return replace(row, status="killed", reason="its launcher was killed")

    def unshipped(self) -> list[Path]:
        """The folders of runs that have ended, and of whose end MLflow has not been told."""
        runs = sorted(path.parent for path in self.folder.glob(f"**/{PROVENANCE}"))
        return [run for run in runs if not is_shipped(run)]

    def begin(self) -> None:
        """Write the sweep down if it isn't yet: for each job that gets as far as a folder.

        Raises ShardlabError if it can't be written, or if the folder has become another sweep's.
        """
        with self._beginning:
            if self.begun:
                return
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                begin_sweep(self.folder, self._about)
            except OSError as error:
                raise ShardlabError(
                    f"hydra.sweep.dir={self.folder} can't be written: {error.strerror or error}"
                ) from error
            self.begun = True

    def finish(
        self,
        rows: list[Row],
        *,
        failed: bool = False,
        interrupted: bool = False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> str:
        """Write down how it ended, and have MLflow show it.

        Returns the status: KILLED if interrupted, else FAILED if failed, else FINISHED.

        rows: of the jobs that the command has; give_up: asked whether to wait for a slow server no more
        A server that can't be written costs one warning line.
        """
        counted = {status: sum(row.status == status for row in rows) for status in STATUSES}
        status = "KILLED" if interrupted else "FAILED" if failed else "FINISHED"
        metrics = {
            "sweep/jobs_finished": float(sum(counted[status] for status in DONE)),
            "sweep/jobs_failed": float(counted["failed"]),
            "sweep/jobs_killed": float(counted["killed"]),
            "sweep/jobs_refused": float(counted["refused"]),
        }
        tags = {}
        best = best_rows(rows, self._objectives)
        if len(self._objectives) == 1 and best:
            metrics[f"sweep/best_{self._objectives[0].replace('/', '_')}"] = best[0].objective[0]
            tags = {"shardlab.best_job": str(best[0].number), "shardlab.best": best[0].what[:5000]}
        try:
            write_csv(rows, self.folder, self._objectives)
            stores = end_sweep(self.folder, status, metrics, tags)
        except OSError as error:  # a full disk
            tell(f"warning: the sweep's end can't be written: {error.strerror or error}", sys.stderr)
            return status
        problems: list[str] = []

        def ship() -> None:
            for store in stores:
                try:
                    ship_sweep(self.folder, store)
                except Exception as error:
                    problems.append(problem(store, error))

        shipping = threading.Thread(target=ship, name="mlflow sweep", daemon=True)
        shipping.start()
        deadline = time.monotonic() + max(map(patience, stores), default=0.0)
        while shipping.is_alive() and time.monotonic() < deadline and not give_up():
            shipping.join(0.1)
        if shipping.is_alive():
            problems.append("MLflow has not answered yet")
        run = next((self.folder / row.folder for row in rows if row.folder), self.folder)
        for line in problems:
            tell(f"warning: {line}; to ship the sweep's end later: shardlab sync {run}", sys.stderr)
        return status
