"""Runs whose launcher was killed: the next command writes the end that they never got.

A launcher writes the end of its runs whatever happens, unless it is killed itself. Then the record has no `end`, and
MLflow shows RUNNING for ever. Whether it is dead, only its own machine can know: its process id is gone or another
process's, or the machine has been started anew. What can't be known is left alone. So is a record that somebody
still has open.
"""

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.errors import ShardlabError
from shardlab.tracking.points import launcher_of
from shardlab.tracking.provenance import launcher, lives
from shardlab.tracking.record import EVENTS, PROVENANCE, EventLog, read_events, read_provenance
from shardlab.tracking.shipper import Shipper
from shardlab.tracking.store import Store, open_store, quiet
from shardlab.tracking.sweep_parent import SWEEP, read_sweep, settle_sweep, ship_sweep

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

REASON = "its launcher was killed"

SETTLE_SECONDS = 15.0
"""After that long, the rest is left to the next command: a run that has ended waits for this."""

_settled: set[Store] = set()
_settling = threading.Lock()


def settle_run(folder: Path) -> bool:
    """Write the end, KILLED, of a run whose launcher is known to be dead. Returns whether it was so.

    Harmless from several processes at once, and for a run that lives, has an end or isn't there. The end's time is
    that of the last event. Raises ShardlabError if the record is damaged, OSError if it can't be written.
    """
    about = read_provenance(folder)
    if about is None or lives(about) is not False:
        return False
    try:
        log = EventLog(folder / EVENTS, alone=True)
    except BlockingIOError:
        return False
    try:
        events = read_events(folder / EVENTS)
        if any(event["event"] == "end" for event in events):
            return False
        last = max([about["started"], *(event["time"] for event in events)])
        log.write("end", time=last, status="KILLED", reason=REASON, seconds=last - about["started"])
    finally:
        log.close()
    return True


def settle_once(store: Store) -> None:
    """`settle_store`, the first time that this process asks for the store. Raises whatever MLflow does."""
    with _settling:
        if store in _settled:
            return
        _settled.add(store)
    with quiet():
        client, experiment = open_store(store)
        settle_store(client, experiment, store)


def settle_store(client: "MlflowClient", experiment: str, store: Store) -> None:
    """Settle the runs and sweeps that MLflow shows as RUNNING and whose launcher is known to be dead.

    client, experiment: of the store. The jobs of a sweep come before the sweep. A run whose folder is gone is marked
    in MLflow alone. Raises whatever MLflow does.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    running = f"attributes.status = 'RUNNING' and tags.`shardlab.host` = '{launcher()['host']}'"
    found, token = [], None
    while token != "":
        page = client.search_runs([experiment], running, page_token=token)
        found += [run for run in page if lives(launcher_of(run.data.tags)) is False]
        token = page.token or ""
    for run in sorted(found, key=lambda run: "mlflow.parentRunId" not in run.data.tags):
        if time.monotonic() > deadline:
            return
        _settle(client, run, store)


def _settle(client: "MlflowClient", run: "Run", store: Store) -> None:
    tags: dict[str, str] = run.data.tags
    if folder := _folder_of(tags):
        with contextlib.suppress(ShardlabError, OSError):  # its record is damaged, or can't be written
            if (folder / SWEEP).exists():
                settle_sweep(folder, _last_sign(folder))
                if "status" in read_sweep(folder):
                    ship_sweep(folder, store)
                return
            settle_run(folder)
            shipper = Shipper(folder, store)
            shipper.ship()
            return
    client.set_tag(run.info.run_id, "shardlab.reason", REASON)
    client.set_terminated(run.info.run_id, "KILLED")


def _folder_of(tags: dict[str, str]) -> Path | None:
    """The folder of a run or sweep, if it still is its."""
    folder = Path(tags.get("shardlab.folder", ""))
    about: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        about = (read_sweep(folder) or read_provenance(folder) or {}) if folder.is_absolute() else {}
    return folder if about.get("id") == tags.get("shardlab.id", "") else None


def _last_sign(sweep: Path) -> float:
    """When a job of the sweep last wrote something; unix seconds."""
    last = float(read_sweep(sweep)["started"])
    for path in sweep.glob(f"**/{PROVENANCE}"):
        with contextlib.suppress(ShardlabError):
            last = max([last, *(float(event["time"]) for event in read_events(path.parent / EVENTS))])
    return last
