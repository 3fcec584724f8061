"""When a run's record is shipped to MLflow: while it is written, or later.

During a run it happens in a background thread of the launcher, which hides MLflow's slow import; a server that is
dead or slow costs the training nothing, and `shardlab sync` brings the rest later. What launchers that were killed
have left unfinished in the store is settled on the way (settle.py).
"""

import contextlib
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.tracking.record import RunRecord, read_link
from shardlab.tracking.settle import settle_once, settle_run
from shardlab.tracking.shipper import Shipper
from shardlab.tracking.store import Store, problem

SHIP_SECONDS = 5.0
SINK_SECONDS = 30.0
"""How long the end of a run, or of a sweep, waits for a slow server; a second Ctrl-C ends the wait."""

DATABASE_SECONDS = 300.0
"""How long for a database in a file: where others write too it is slow, but it does not go away."""

LONGEST_PAUSE = 60.0
RETRY_SECONDS = 1.0
"""Between two tries of the end of a run in a database that somebody else had locked."""


def patience(store: Store) -> float:
    """Seconds that the end of a run waits for a store."""
    return SINK_SECONDS if store.database is None else DATABASE_SECONDS


class Sink:
    """Ships a run in the background while it goes on. Nothing that happens to it reaches the run."""

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self.folder = folder
        self._shipper = Shipper(folder, store)
        self._problem: str | None = None
        self._run_is_over = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow sink", daemon=True)
        self._started = False

    def start(self) -> None:
        """Begin; further calls do nothing. To be called once the ranks are started: it must not slow that down."""
        if not self._started:
            self._started = True
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether MLflow has everything."""
        return self._shipper.done and self._shipper.not_stored is None and not self._thread.is_alive()

    def close(self) -> None:
        """Have the rest shipped, the end included, which must be in the record by now; returns at once."""
        self.start()
        self._run_is_over.set()

    def finish(self, give_up: Callable[[], bool] = lambda: False) -> str | None:
        """`close`, and wait until MLflow has everything, or for as long as the store's kind deserves.

        give_up: asked ten times a second whether to wait no more
        Returns None if MLflow has everything, otherwise one line that says why not and what to do.
        """
        self.close()
        deadline = time.monotonic() + patience(self._shipper.store)
        while self._thread.is_alive() and time.monotonic() < deadline and not give_up():
            self._thread.join(0.1)
        self._given_up.set()
        if self._shipper.done and self._shipper.not_stored is None:
            return None
        why = self._problem or self._shipper.not_stored or f"MLflow at {self._shipper.store.shown} has not answered yet"
        return f"{why}; the run record is whole, to ship it later: shardlab sync {self.folder}"

    def _work(self) -> None:
        pause = SHIP_SECONDS
        while True:
            last = self._run_is_over.is_set()
            try:
                self._shipper.ship()
                self._problem, pause = None, SHIP_SECONDS
                with contextlib.suppress(Exception):  # other runs' affairs; the next command tries again
                    settle_once(self._shipper.store)
            except Exception as error:
                self._problem = problem(self._shipper.store, error)
                pause = min(2 * pause, LONGEST_PAUSE)
            if self._shipper.done:
                return
            if not last:
                self._run_is_over.wait(pause)
            elif self._shipper.store.database is None or self._given_up.wait(RETRY_SECONDS):
                return


def is_shipped(folder: Path) -> bool:
    """Whether MLflow has got the end of a run."""
    return "status" in (read_link(folder) or {})


class Backlog:
    """Ships runs that have ended, one after the other, in the background: an earlier launcher was killed before it had.

    folders: of the runs; one that can't be read is left alone
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._left = list(folders)
        self._problem: str | None = None
        self._store: Store | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow backlog", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether MLflow has everything."""
        return not self._left and not self._thread.is_alive()

    def finish(self, give_up: Callable[[], bool] = lambda: False) -> str | None:
        """See Sink.finish."""
        deadline = time.monotonic() + (SINK_SECONDS if self._store is None else patience(self._store))
        while self._thread.is_alive() and time.monotonic() < deadline and not give_up():
            self._thread.join(0.1)
        self._given_up.set()
        if self.is_done:
            return None
        why = self._problem or "MLflow has not answered yet"
        return f"{why}; to ship earlier runs later: " + " and ".join(f"shardlab sync {run}" for run in self._left[:3])

    def _work(self) -> None:
        for folder in list(self._left):
            while not self._ship(folder):
                # A database will be free again; a server that is away would take its time with every run.
                if self._store is None or self._store.database is None or self._given_up.wait(RETRY_SECONDS):
                    return
            self._left.remove(folder)

    def _ship(self, folder: Path) -> bool:
        """Whether nothing more can be done for a run."""
        try:
            shipper = Shipper(folder)
            self._store = shipper.store
            shipper.ship()
            with contextlib.suppress(Exception):
                settle_once(shipper.store)
        except (ShardlabError, OSError, ValueError):  # it was cut off as it was being made
            pass
        except Exception as error:
            self._problem = problem(self._store, error) if self._store is not None else str(error)
            return False
        return True


def sync(folder: Path) -> int:
    """Ship a run's record from its beginning; harmless for what MLflow has already. Returns the number of points.

    It goes where the run went before, else where its config or MLflow's environment variables say now. Prints where.
    A run whose launcher was killed gets its end first.

    Raises ShardlabError if the folder holds no whole run, or if MLflow can't be written.
    """
    RunRecord.load(folder)
    with contextlib.suppress(OSError):  # somebody else's folder, that can be read and not written
        settle_run(folder)
    shipper = Shipper(folder)
    try:
        shipper.ship()
    except ShardlabError:
        raise
    except Exception as error:
        raise ShardlabError(problem(shipper.store, error)) from error
    if shipper.not_stored:
        raise ShardlabError(shipper.not_stored)
    print(f"{folder}: {shipper.shipped} points are in MLflow at {shipper.store.shown}")
    return shipper.shipped


def where_to_look(folder: Path) -> str | None:
    """How to open MLflow's page of a run that is shown there: an address, or a command. None if it isn't shown."""
    link = read_link(folder)
    if link is None:
        return None
    if link["uri"].startswith("http"):
        return f"{link['uri'].rstrip('/')}/#/experiments/{link['experiment_id']}/runs/{link['run_id']}"
    command = shutil.which("mlflow") or Path(sys.executable).with_name("mlflow")
    shown = "mlflow" if shutil.which("mlflow") else os.path.relpath(command)
    here = Store(link["uri"], "").database == Path("mlflow.db").absolute()
    return f"{shown} ui" if here else f"{shown} ui --backend-store-uri {shlex.quote(link['uri'])}"
