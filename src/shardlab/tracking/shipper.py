"""Shipping a run's record to MLflow.

The record is the truth and MLflow is where it is shown, so shipping may fail, stop anywhere and begin again from the
record's first line: the run is found by our id, and a point that MLflow has already is kept once (points.py).
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from shardlab.config.schema import TrackingConfig
from shardlab.tracking.points import Point, launcher_tags, params, points, source_name, tags_of
from shardlab.tracking.record import EVENTS, LINK, PROVENANCE, Event, Tail, read_link
from shardlab.tracking.store import (
    Store,
    alone,
    find_or_create_run,
    open_store,
    problem,
    quiet,
    store_of,
    with_credentials,
)
from shardlab.tracking.sweep_parent import ship_sweep

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BATCH = 1000
"""Points in one call; a server takes no more."""

PARAM_BATCH = 100


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
        self._link: dict[str, str] = {}
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
        self._run = find_or_create_run(client, experiment, about, run_tags(about, self.folder, parent))
        values, long = params(OmegaConf.to_container(OmegaConf.load(self.folder / "config.yaml")))  # type: ignore[arg-type]
        for batch in _batches([Param(key, value) for key, value in values.items()], PARAM_BATCH):
            client.log_batch(self._run, params=batch)
        if long:
            self._tags["shardlab.params_only_in_config_yaml"] = " ".join(long)[:5000]
        if data := about.get("data"):
            dataset = Dataset(data["name"], data["fingerprint"][:36], "local", json.dumps(data))
            with alone(self.store):  # MLflow itself lets two runs with one dataset collide
                for run in [self._run, *([parent] if parent else [])]:
                    client.log_inputs(run, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])])
        self._store_files(client, [self.folder / "config.yaml", self.folder / PROVENANCE])
        self._link = {
            "uri": self.store.shown,
            "experiment": self.store.experiment,
            "experiment_id": experiment,
            "run_id": self._run,
        }
        self._write_link()
        self._client = client

    def _write_link(self) -> None:
        (self.folder / LINK).write_text(json.dumps(self._link, indent=2) + "\n", encoding="utf-8")

    def _finish(self, client: "MlflowClient", end: Event) -> None:
        """The record itself, and the status. The logs too, if something went wrong."""
        files = [self.folder / EVENTS, *sorted(self.folder.glob("rank-*.jsonl"))]
        if end["status"] != "FINISHED":
            files += sorted(self.folder.glob("rank-*.log"))
        self._store_files(client, files)
        client.set_terminated(self._run, end["status"], end_time=int(end["time"] * 1000))
        self._link["status"] = end["status"]
        with contextlib.suppress(OSError):  # a full disk: it will be shipped once more
            self._write_link()

    def _store_files(self, client: "MlflowClient", files: list[Path]) -> None:
        for path in files:
            if path.exists():
                try:
                    client.log_artifact(self._run, str(path))
                except Exception as error:
                    self.not_stored = f"{path.name} is not stored there: {problem(self.store, error)}"


def run_tags(about: dict[str, Any], folder: Path, parent: str | None) -> dict[str, str]:
    """The tags of a new MLflow run. about: provenance; folder: the run's; parent: id of the sweep's MLflow run."""
    tags = {
        **launcher_tags(about),
        "shardlab.folder": str(folder.absolute()),
        "mlflow.user": about["user"],
        "mlflow.source.name": source_name(about["command"]),
        "shardlab.command": " ".join(about["command"])[:5000],
        "mlflow.source.type": "LOCAL",
    }
    if about.get("config_hash"):
        tags["shardlab.config_hash"] = about["config_hash"]
    if about.get("job") is not None:
        tags |= {"shardlab.job": str(about["job"]), "shardlab.overrides": str(about["own_overrides"])[:5000]}
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
