"""A sweep's own MLflow run: the parent under which MLflow folds the runs of its jobs.

What is known of the sweep stands in sweep.json of its folder, and is shipped from there whenever a job is, so a
server that was away gets the parent with the first job that is synced. MLflow's page shows the parent's metrics
first, so it carries the sweep's summary.

Two locks: one for the moments in which sweep.json is read and written, which a job may wait for, and one for the
time that a slow server takes, for which only the threads that ship wait.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.errors import ShardlabError
from shardlab.tracking.points import finite, launcher_tags, source_name
from shardlab.tracking.provenance import launcher, lives, user
from shardlab.tracking.store import Store, find_or_create_run, open_store, quiet, with_credentials

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from mlflow.tracking import MlflowClient

SWEEP = "sweep.json"

SHOWN = ("sweep.csv", "*.png")
"""Files of the sweep's folder that become artifacts of the parent once it has ended."""


def write_sweep(folder: Path, about: dict[str, Any]) -> None:
    """Write sweep.json, whole or not at all.

    about: id, name, folder, command, space, user, started, launcher; once it has ended: status, ended, metrics, tags
    links: the MLflow runs that show it, each with uri, experiment, run_id and the status that it shows
    """
    new = folder / f"{SWEEP}.{os.getpid()}.{threading.get_ident()}"
    try:
        new.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        new.rename(folder / SWEEP)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read_sweep(folder: Path) -> dict[str, Any]:
    """What sweep.json holds; {} without one."""
    try:
        about = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return dict(about)


def begin_sweep(folder: Path, about: dict[str, Any]) -> None:
    """Write down that this process runs the sweep; nothing, if another of its jobs has done so.

    folder: there already
    about: id (32 hex digits), command (its words), space (those of them that take several values), and whatever else
    sweep.json is to hold. A sweep that is resumed comes with the id that is there: it gets this launcher, and runs.

    Raises ShardlabError if the folder is another sweep's (of two that began at once, the second), or if another
    process of this machine still runs it.
    """
    with _lock(folder):
        before, me = read_sweep(folder), launcher()
        if before and before["id"] != about["id"]:
            raise ShardlabError(f"hydra.sweep.dir={folder} holds another sweep; give another folder")
        theirs = before.get("launcher", {})
        if before and "status" not in before:
            if theirs == me:
                return
            if lives(theirs):
                raise ShardlabError(
                    f"hydra.sweep.dir={folder}: process {theirs['pid']} still runs this sweep; wait for its end"
                )
        for ended in ("status", "ended", "metrics", "tags"):
            before.pop(ended, None)
        new = {"name": f"sweep {folder.name}", "user": user(), "started": time.time()}
        here = {"folder": str(folder.absolute()), "launcher": me}
        write_sweep(folder, {**new, **before, **about, **here})


def end_sweep(folder: Path, status: str, metrics: dict[str, float], tags: dict[str, str] | None = None) -> list[Store]:
    """Write down how the sweep ended; returns the stores that have its parent run, to be shipped to.

    status: FINISHED, FAILED or KILLED; metrics: its summary, by MLflow's names; tags: of the parent. By a tag
    shardlab.best_job, the best job's number, the parent gets shardlab.best_run too: that job's MLflow run.
    """
    with _lock(folder):
        about = read_sweep(folder)
        ended = {"status": status, "ended": time.time(), "metrics": metrics, "tags": tags or {}}
        write_sweep(folder, {**about, **ended})
    return [with_credentials(Store(link["uri"], link["experiment"])) for link in about.get("links", [])]


def settle_sweep(folder: Path, ended: float) -> bool:
    """Write down that the sweep was killed, if its launcher is dead and wrote no end. Returns whether it was so.

    ended: unix seconds of its last sign of life
    """
    with _lock(folder):
        about = read_sweep(folder)
        if not about or "status" in about or lives(about.get("launcher", {})) is not False:
            return False
        write_sweep(folder, {**about, "status": "KILLED", "ended": ended, "metrics": {}, "tags": {}})
    return True


def ship_sweep(folder: Path, store: Store) -> str | None:
    """Bring the sweep's parent run up to date in a store; returns its MLflow id. None if the folder holds no sweep.

    It is made once for each store, whoever comes first; RUNNING until end_sweep, and again once it is resumed.
    Raises whatever MLflow does.
    """
    if not (folder / SWEEP).exists():
        return None
    with quiet():
        client, experiment = open_store(store)
        with _lock(folder, "shipping"):
            return _ship(client, experiment, folder, store)


def _ship(client: "MlflowClient", experiment: str, folder: Path, store: Store) -> str:
    from mlflow.entities import Metric, RunTag

    about = read_sweep(folder)
    where = {"uri": store.shown, "experiment": store.experiment}
    link = next((link for link in about.get("links", []) if link.items() >= where.items()), None)
    tags = {
        **launcher_tags(about.get("launcher", {})),
        "shardlab.folder": str(folder.absolute()),
        "shardlab.command": " ".join(about["command"])[:5000],
        "shardlab.space": " ".join(about.get("space", []))[:5000],
        "mlflow.user": about["user"],
        "mlflow.source.name": source_name(about["command"]),
        "mlflow.source.type": "LOCAL",
    }
    parent = link["run_id"] if link else find_or_create_run(client, experiment, about, tags)
    status = about.get("status", "RUNNING")
    if link is None or link.get("status") != status:
        client.log_batch(parent, tags=[RunTag(key, value) for key, value in tags.items()])
        if "status" not in about:
            client.update_run(parent, status="RUNNING")
    if "status" in about:
        ended = int(about["ended"] * 1000)
        metrics = [Metric(key, finite(value), ended, 0) for key, value in about["metrics"].items()]
        found = {**about.get("tags", {}), **_best_run(client, experiment, parent, about.get("tags", {}))}
        client.log_batch(parent, metrics=metrics, tags=[RunTag(key, value) for key, value in found.items()])
        client.set_terminated(parent, status, end_time=ended)
        for path in sorted(path for pattern in SHOWN for path in folder.glob(pattern)):
            with contextlib.suppress(Exception):  # a server may take numbers and no files; they stay where they are
                client.log_artifact(parent, str(path))
    with _lock(folder):
        about, now = read_sweep(folder), {**where, "run_id": parent, "status": status}
        others = [link for link in about.get("links", []) if not link.items() >= where.items()]
        if link != now:
            write_sweep(folder, {**about, "links": [*others, now]})
    return str(parent)


def _best_run(client: "MlflowClient", experiment: str, parent: str, tags: dict[str, str]) -> dict[str, str]:
    """shardlab.best_run, the MLflow id of the job that shardlab.best_job numbers, if it is there."""
    if "shardlab.best_job" not in tags:
        return {}
    of_job = f"tags.`mlflow.parentRunId` = '{parent}' and tags.`shardlab.job` = '{tags['shardlab.best_job']}'"
    found = client.search_runs([experiment], of_job, max_results=1)
    return {"shardlab.best_run": found[0].info.run_id} if found else {}


def _lock(folder: Path, kind: str = "") -> "BaseFileLock":
    from filelock import FileLock

    return FileLock(folder / f"{SWEEP}{'.' + kind if kind else ''}.lock")
