"""A fresh sqlite store is made whole or not at all, whatever ends its making."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlab.config.schema import TrackingConfig
from shardlab.tracking.store import Store, open_store, store_of


def test_a_store_whose_making_was_cut_off_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow can't go on with half a database: "table already exists", for good."""

    def full(engine: object) -> None:
        raise OSError(28, "No space left on device")

    store = Store(f"sqlite:///{tmp_path}/[a] mlflow.db?timeout=9", "e")
    (tmp_path / "[a] mlflow.db.1.unfinished-journal").touch()  # of a builder that was killed
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", full)
        with pytest.raises(OSError, match="No space"):
            open_store(store)
    assert not list(tmp_path.glob("*mlflow.db"))
    client, experiment = open_store(store)
    assert client.get_experiment(experiment).artifact_location == (tmp_path / "mlruns/experiment-e").as_uri()
    assert {path.name for path in tmp_path.iterdir()} >= {"[a] mlflow.db", "[a] mlflow.db.lock"}
    assert not list(tmp_path.glob("*unfinished*"))


FIRST_USE = """
import sys, time
from shardlab.config.schema import TrackingConfig
from shardlab.tracking.store import open_store, store_of
import mlflow.store.tracking.sqlalchemy_store
time.sleep(max(0, float(sys.argv[1]) - time.time()))  # all at once
client, experiment = open_store(store_of(TrackingConfig()))
client.create_run(experiment)
"""


def test_of_processes_that_first_use_a_store_at_once_none_fails_and_nothing_is_lost() -> None:
    """Without a lock three of four would fail in MLflow's migrations."""
    begin = time.time() + 8
    processes = [subprocess.Popen([sys.executable, "-c", FIRST_USE, str(begin)]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    client, experiment = open_store(store_of(TrackingConfig()))
    assert len(client.search_runs([experiment])) == 3
