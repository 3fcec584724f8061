"""A fresh sqlite store is made whole or not at all, whatever ends its making."""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardlab.config.schema import TrackingConfig
from shardlab.tracking.store import Store, open_store, quiet, store_of


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
import sys, threading, time
from pathlib import Path
from shardlab.config.schema import TrackingConfig
from shardlab.tracking.store import open_store, store_of

def use(name):
    client, experiment = open_store(store_of(TrackingConfig()))
    from mlflow.entities import Metric, Param, RunTag
    run = client.create_run(experiment, run_name=name).info.run_id
    for batch in range(5):
        points = [Metric(f"m{number}", float(batch), 1000 + batch, batch) for number in range(100)]
        client.log_batch(run, metrics=points, params=[Param(f"p{batch}", "1")], tags=[RunTag("last", str(batch))])
    client.set_terminated(run)
    done.append(name)

process = sys.argv[1]
if process != "late":
    import mlflow.store.tracking.sqlalchemy_store
Path(process + ".ready").touch()
while len(list(Path().glob("*.ready"))) < 3:  # all at once
    time.sleep(0.01)
done = []
threads = [threading.Thread(target=use, args=(f"{process}-{number}",)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(done) != 2)
"""


def test_of_all_that_first_use_a_store_at_once_none_fails_and_nothing_is_lost() -> None:
    """Three processes of two threads; those of the late one import MLflow at once, too. Without a lock most of them
    would fail in MLflow's migrations."""
    names = ["a", "b", "late"]
    with Path("said.txt").open("w") as said:
        processes = [
            subprocess.Popen([sys.executable, "-c", FIRST_USE, name], stdout=said, stderr=said) for name in names
        ]
    ends = [process.wait(timeout=200) for process in processes]
    assert (ends, Path("said.txt").read_text()) == ([0] * 3, "")  # none of MLflow's chatter either
    client, experiment = open_store(store_of(TrackingConfig()))
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(runs) == {f"{name}-{number}" for name in names for number in range(2)}
    for run in runs.values():
        assert (run.info.status, run.data.tags["last"], len(run.data.params)) == ("FINISHED", "4", 5)
        assert run.data.metrics == {f"m{number}": 4.0 for number in range(100)}
        assert len(client.get_metric_history(run.info.run_id, "m99")) == 5


def test_mlflow_is_quiet_until_the_last_thread_has_left() -> None:
    import mlflow  # noqa: F401 - it sets its loggers' levels

    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with quiet():
            inside.set()
            assert leave.wait(60)

    other = threading.Thread(target=work)
    with quiet():
        other.start()
        assert inside.wait(60)
    assert [logger.level for logger in loggers] == [logging.ERROR] * 3
    leave.set()
    other.join()
    assert [logger.level for logger in loggers] == [logging.INFO] * 3
