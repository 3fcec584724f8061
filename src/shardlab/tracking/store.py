"""Which MLflow store a run goes to, and opening it.

A fresh sqlite store that two processes create at once is broken for good in one of four trials, so opening takes a
lock beside the database; one whose creation is cut off is broken too, so it gets its name when it is whole.
Everything goes through MlflowClient with explicit ids: MLflow's global "active run" belongs to the user's own code.
MLflow is imported in here only, because it takes one to nine seconds.
"""

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardlab.config.schema import TrackingConfig
from shardlab.tracking.provenance import without_credentials

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DEFAULT_EXPERIMENT = "shardlab"

SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # 7 by default: minutes for a server that is gone
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Environment of MLflow, each unless the user has set it."""

CHATTY = ("mlflow", "alembic", "urllib3")
"""The loggers that speak while a run is shipped."""


def set_environment() -> None:
    """Apply SETTINGS to this process: for the command alone, since in a user's own they would hold for their MLflow."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


class _Quiet:
    """How many threads want MLflow's loggers quiet, and their levels before the first of them came."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.levels: dict[str, int] = {}


_quiet = _Quiet()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Have MLflow's loggers say nothing below an error while any thread is inside.

    MLflow is imported by then, by one thread: two at once may see each other's modules half made.
    """
    with _quiet.lock:
        import mlflow.tracking  # noqa: F401 - it sets the levels, which must have happened

        if _quiet.inside == 0:
            _quiet.levels = {name: logging.getLogger(name).level for name in CHATTY}
            for name in CHATTY:
                logging.getLogger(name).setLevel(logging.ERROR)
        _quiet.inside += 1
    try:
        yield
    finally:
        with _quiet.lock:
            _quiet.inside -= 1
            if _quiet.inside == 0:
                for name, level in _quiet.levels.items():
                    logging.getLogger(name).setLevel(level)


@dataclass(frozen=True)
class Store:
    """Where a run is shown. uri: MLflow's, absolute; it may hold a password, `shown` does not."""

    uri: str
    experiment: str

    @property
    def shown(self) -> str:
        """The uri as it may be printed and kept."""
        return without_credentials(self.uri)

    @property
    def database(self) -> Path | None:
        """The file of a sqlite store."""
        prefix = "sqlite:///"
        return Path(self.uri[len(prefix) :].partition("?")[0]) if self.uri.startswith(prefix) else None

    @property
    def is_file_store(self) -> bool:
        """Whether it is a folder of files, MLflow's format before databases."""
        return self.uri.startswith("file:") or ("://" not in self.uri and not self.uri.startswith("databricks"))


def store_of(tracking: TrackingConfig) -> Store:
    """The store that a config names: its own keys, else MLflow's environment variables, else mlflow.db in this folder.

    That default is the database which a bare `mlflow ui` in the same folder opens.
    """
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    prefix = "sqlite:///"
    if uri.startswith(prefix):
        uri = prefix + os.path.abspath(uri[len(prefix) :])
    elif "://" not in uri and not uri.startswith(("file:", "databricks")):
        uri = os.path.abspath(uri)
    return Store(uri, tracking.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT)


def with_credentials(store: Store) -> Store:
    """The same store with the password of MLFLOW_TRACKING_URI, if that names the same one."""
    named = store_of(TrackingConfig(experiment=store.experiment))
    return named if named.shown == store.uri else store


def open_store(store: Store) -> "tuple[MlflowClient, str]":
    """A client, and the id of the MLflow experiment, made if it isn't there. Raises whatever MLflow does.

    Four processes with three threads each that open, make runs and log at once were seen to lose nothing, and no call
    to take more than 4 s: MLflow has sqlite wait for 20 s before a database counts as locked.
    """
    with quiet(), alone(store):
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        if store.database is not None:
            _create(Path(os.path.realpath(store.database)))
        client = MlflowClient(tracking_uri=store.uri)
        found = client.get_experiment_by_name(store.experiment)
        if found is None:
            try:
                return client, str(client.create_experiment(store.experiment, artifact_location=_artifacts(store)))
            except MlflowException:  # another machine has just made it
                found = client.get_experiment_by_name(store.experiment)
                if found is None:
                    raise
        return client, str(found.experiment_id)


def find_or_create_run(client: "MlflowClient", experiment: str, about: dict[str, Any], tags: dict[str, str]) -> str:
    """The id of the MLflow run that carries our id, made if there is none. Raises whatever MLflow does.

    about: id, name and start (unix seconds) of the run or sweep; tags: of a new MLflow run
    """
    found = client.search_runs([experiment], f"tags.`shardlab.id` = '{about['id']}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    started = int(about["started"] * 1000)
    tags = {"shardlab.id": about["id"], **tags}
    return str(client.create_run(experiment, run_name=about["name"], start_time=started, tags=tags).info.run_id)


def alone(store: Store) -> contextlib.AbstractContextManager[object]:
    """A lock against other processes that open the same database file."""
    if store.database is None:
        return contextlib.nullcontext()
    from filelock import FileLock

    store.database.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{store.database}.lock")


def _create(database: Path) -> None:
    """Make a sqlite store that isn't there yet, whole or not at all. To be called alone.

    MLflow can't finish a database whose migrations were cut off, by a signal or a full disk.
    """
    if database.exists() and database.stat().st_size:
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for left in database.parent.glob(f"{escape(database.name)}.*.unfinished*"):
        left.unlink()
    unfinished = database.with_name(f"{database.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        made = SqlAlchemyStore(f"sqlite:///{unfinished}", str(database.parent / "mlruns"))  # type: ignore[no-untyped-call]
        made.engine.dispose()
        unfinished.rename(database)
    except BaseException:
        for left in database.parent.glob(f"{escape(unfinished.name)}*"):
            left.unlink()
        raise


def _artifacts(store: Store) -> str | None:
    """Where a new experiment's files go: mlruns/NAME beside the database; a server decides for itself.

    Named after the experiment: a numbered folder is what MLflow's file store would make.
    """
    if store.database is None:
        return None
    return (store.database.parent / "mlruns" / f"experiment-{quote(store.experiment, safe='')}").as_uri()


def problem(store: Store, error: BaseException) -> str:
    """Why the store can't be written, in one line, with advice where there is any."""
    if store.is_file_store and "ALLOW_FILE_STORE" in str(error):
        return (
            f"{store.shown} is a file store, which this MLflow does not write unless MLFLOW_ALLOW_FILE_STORE=true; "
            "tracking.uri=sqlite:///mlflow.db would work"
        )
    if any(sign in str(error) for sign in ("Max retries exceeded", "Connection refused", "timed out")):
        return f"MLflow at {store.shown} can't be reached"
    said = without_credentials(" ".join(str(error).split()))
    return f"MLflow at {store.shown} failed: {said[:300] or type(error).__name__}"
