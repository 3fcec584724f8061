"""A sweep's own MLflow run: the parent under which MLflow folds the runs of its jobs.

What is known of the sweep stands in sweep.json of its folder, and is shipped from there whenever a job is, so a
server that was away gets the parent with the first job that is synced. MLflow's page shows the parent's metrics
first, so it carries the sweep's summary.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from shardlab.errors import ShardlabError
from shardlab.tracking.points import finite
from shardlab.tracking.store import Store, find_or_create_run, open_store, with_credentials

SWEEP = "sweep.json"


def write_sweep(folder: Path, about: dict[str, Any]) -> None:
    """Write sweep.json, whole or not at all.

    about: id, name, command, user, started; once it has ended: status, ended, metrics
    links: the MLflow runs that show it, each with uri, experiment and run_id
    """
    new = folder / f"{SWEEP}.{os.getpid()}"
    new.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    new.rename(folder / SWEEP)


def read_sweep(folder: Path) -> dict[str, Any]:
    """What sweep.json holds; {} without one."""
    try:
        about = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return dict(about)


def ship_sweep(folder: Path, store: Store) -> str | None:
    """Bring the sweep's parent run up to date in a store; returns its MLflow id. None if the folder holds no sweep.

    It is made once for each store, whoever comes first. Raises whatever MLflow does.
    """
    from filelock import FileLock

    if not (folder / SWEEP).exists():
        return None
    client, experiment = open_store(store)
    from mlflow.entities import Metric

    with FileLock(folder / f"{SWEEP}.lock"):
        about = read_sweep(folder)
        links = about.setdefault("links", [])
        where = {"uri": store.shown, "experiment": store.experiment}
        parent = next((str(link["run_id"]) for link in links if link.items() >= where.items()), None)
        if parent is None:
            tags = {
                "mlflow.user": about["user"],
                "mlflow.source.name": " ".join(about["command"])[:1000],
                "mlflow.source.type": "LOCAL",
                "shardlab.command": " ".join(about["command"])[:5000],
            }
            parent = find_or_create_run(client, experiment, about, tags)
            links.append({**where, "run_id": parent})
            write_sweep(folder, about)
        if "status" in about:
            ended = int(about["ended"] * 1000)
            metrics = [Metric(key, finite(value), ended, 0) for key, value in about["metrics"].items()]
            client.log_batch(parent, metrics=metrics)
            client.set_terminated(parent, about["status"], end_time=ended)
    return parent


def begin_sweep(folder: Path, sweep_id: str, command: list[str], user: str) -> None:
    """Write sweep.json for a new sweep; nothing, if another job of it has done so.

    Raises ShardlabError if the folder is another sweep's: of two that began at once, the second.
    """
    from filelock import FileLock

    with FileLock(folder / f"{SWEEP}.lock"):
        if (folder / SWEEP).exists():
            if read_sweep(folder)["id"] != sweep_id:
                raise ShardlabError(f"hydra.sweep.dir={folder} holds another sweep; give another folder")
        else:
            about = {"id": sweep_id, "name": f"sweep {folder.name}", "command": command, "user": user}
            write_sweep(folder, {**about, "started": time.time()})


def end_sweep(folder: Path, status: str, metrics: dict[str, float]) -> list[Store]:
    """Write down how the sweep ended; returns the stores that have its parent run, to be shipped to."""
    from filelock import FileLock

    with FileLock(folder / f"{SWEEP}.lock"):
        about = read_sweep(folder)
        write_sweep(folder, {**about, "status": status, "ended": time.time(), "metrics": metrics})
    return [with_credentials(Store(link["uri"], link["experiment"])) for link in about.get("links", [])]
