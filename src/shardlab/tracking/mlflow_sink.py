"""Shipping a run's record to MLflow.

The record is the truth and MLflow is where it is shown, so shipping may fail, stop anywhere and begin again from the
record's first line: the run is found by our id, and a point that MLflow has already is kept once (points.py). During
a run it happens in a background thread of the launcher, which hides MLflow's slow import; a server that is dead or
slow costs the training nothing, and `shardlab sync` brings the rest later.
"""

import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from shardlab.config.schema import TrackingConfig
from shardlab.errors import ShardlabError
from shardlab.tracking.points import Point, params, points, tags_of
from shardlab.tracking.record import EVENTS, LINK, PROVENANCE, Event, RunRecord, Tail, read_link
from shardlab.tracking.store import Store, find_or_create_run, open_store, problem, quiet, store_of, with_credentials
from shardlab.tracking.sweep_parent import ship_sweep

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BATCH = 1000
"""Points in one call; a server takes no more."""

PARAM_BATCH = 100
SHIP_SECONDS = 5.0
SINK_SECONDS = 30.0
"""How long the end of a run, or of a sweep, waits for a slow server; a second Ctrl-C ends the run's wait."""

LONGEST_PAUSE = 60.0


class Shipper:
    """Brings one run's record to MLflow, from its first line.

    store: where to; by default where the run went before, else where its config says
    shipped: points brought over; done: the end of the run has been shipped
    not_stored: why a file could not be stored, if so: a server may take numbers but no files
    """

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self.folder = folder
        self.store = store or _store_for(folder)
        self.shipped = 0
        self.done = False
        self.not_stored: str | None = None
        self._client: MlflowClient | None = None
        self._run = ""
        self._logs: dict[str, Tail] = {}
        self._points: list[Point] = []
        self._tags: dict[str, str] = {}
        self._end: Event | None = None

    def ship(self) -> None:
        """Bring over what is new. Raises whatever MLflow does; what it has not taken is brought by the next call."""
        with quiet():
            self._ship()

    def _ship(self) -> None:
        if self._client is None:
            self._open()
        client = self._client
        assert client is not None
        from mlflow.entities import Metric, RunTag

        self._read()
        if self._tags:
            client.log_batch(self._run, tags=[RunTag(key, value) for key, value in self._tags.items()])
            self._tags = {}
        while self._points:
            batch = self._points[:BATCH]
            client.log_batch(self._run, metrics=[Metric(*point) for point in batch])
            del self._points[: len(batch)]
            self.shipped += len(batch)
        if self._end is not None and not self.done:
            self._finish(client, self._end)
            self.done = True

    def _read(self) -> None:
        """Take in new events of all ranks."""
        for path in [self.folder / EVENTS, *sorted(self.folder.glob("rank-*.jsonl"))]:
            for event in self._logs.setdefault(path.name, Tail(path)).events():
                self._points += points(event)
                self._tags |= tags_of(event)
                if event["event"] == "end":
                    self._end = event
                elif event["event"] == "resume":
                    self._end = None

    def _open(self) -> None:
        """Find the run in MLflow by our id, or make it, and give it everything that is known beforehand."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        client, experiment = open_store(self.store)
        about = json.loads((self.folder / PROVENANCE).read_text(encoding="utf-8"))
        parent = ship_sweep(Path(about["sweep"]), self.store) if about.get("sweep") else None
        self._run = find_or_create_run(client, experiment, about, run_tags(about, parent))
        values, long = params(OmegaConf.to_container(OmegaConf.load(self.folder / "config.yaml")))  # type: ignore[arg-type]
        for batch in _batches([Param(key, value) for key, value in values.items()], PARAM_BATCH):
            client.log_batch(self._run, params=batch)
        if long:
            self._tags["shardlab.params_only_in_config_yaml"] = " ".join(long)[:5000]
        if data := about.get("data"):
            dataset = Dataset(data["name"], data["fingerprint"][:36], "local", json.dumps(data))
            client.log_inputs(self._run, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])])
        self._store_files(client, [self.folder / "config.yaml", self.folder / PROVENANCE])
        link = {
            "uri": self.store.shown,
            "experiment": self.store.experiment,
            "experiment_id": experiment,
            "run_id": self._run,
        }
        (self.folder / LINK).write_text(json.dumps(link, indent=2) + "\n", encoding="utf-8")
        self._client = client

    def _finish(self, client: "MlflowClient", end: Event) -> None:
        """The record itself, and the status. The logs too, if something went wrong."""
        files = [self.folder / EVENTS, *sorted(self.folder.glob("rank-*.jsonl"))]
        if end["status"] != "FINISHED":
            files += sorted(self.folder.glob("rank-*.log"))
        self._store_files(client, files)
        client.set_terminated(self._run, end["status"], end_time=int(end["time"] * 1000))

    def _store_files(self, client: "MlflowClient", files: list[Path]) -> None:
        for path in files:
            if path.exists():
                try:
                    client.log_artifact(self._run, str(path))
                except Exception as error:
                    self.not_stored = f"{path.name} is not stored there: {problem(self.store, error)}"


class Sink:
    """Ships a run in the background while it goes on. Nothing that happens to it reaches the run."""

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self.folder = folder
        self._shipper = Shipper(folder, store)
        self._problem: str | None = None
        self._run_is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow sink", daemon=True)
        self._started = False

    def start(self) -> None:
        """Begin; further calls do nothing. To be called once the ranks are started: it must not slow that down."""
        if not self._started:
            self._started = True
            self._thread.start()

    def finish(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> str | None:
        """Ship the rest, the end included, which must be in the record by now.

        seconds: how long to wait at most; give_up: asked ten times a second whether to wait no more
        Returns None if MLflow has everything, otherwise one line that says why not and what to do.
        """
        self.start()
        self._run_is_over.set()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not give_up():
            self._thread.join(0.1)
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
            except Exception as error:
                self._problem = problem(self._shipper.store, error)
                pause = min(2 * pause, LONGEST_PAUSE)
            if last or self._shipper.done:
                return
            self._run_is_over.wait(pause)


def sync(folder: Path) -> int:
    """Ship a run's record from its beginning; harmless for what MLflow has already. Returns the number of points.

    It goes where the run went before, else where its config or MLflow's environment variables say now. Prints where.
    Raises ShardlabError if the folder holds no whole run, or if MLflow can't be written.
    """
    RunRecord.load(folder)
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


def run_tags(about: dict[str, Any], parent: str | None) -> dict[str, str]:
    """The tags of a new MLflow run. about: provenance; parent: id of the sweep's MLflow run."""
    tags = {
        "shardlab.host": about["host"],
        "shardlab.pid": str(about["pid"]),
        "shardlab.boot_id": about["boot_id"],
        "mlflow.user": about["user"],
        "mlflow.source.name": " ".join(about["command"])[:1000] or "shardlab",
        "mlflow.source.type": "LOCAL",
    }
    return tags | ({"mlflow.parentRunId": parent} if parent else {})


def _store_for(folder: Path) -> Store:
    """The store that the run went to before, else the one that its config names."""
    if link := read_link(folder):
        return with_credentials(Store(link["uri"], link["experiment"]))
    tracking = OmegaConf.load(folder / "config.yaml").tracking
    return with_credentials(store_of(TrackingConfig(uri=tracking.uri, experiment=tracking.experiment)))


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
