"""What MLflow shows of a run, and that a store which is away costs nothing.

One sqlite store serves all of them: making one is slow.
"""

import json
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from launch_parts import FINGERPRINT, composed, ended, job_of, stand_in, sweep_of

from shardlab.errors import ShardlabError
from shardlab.launch import run as run_module
from shardlab.launch.run import RunFailed, run
from shardlab.tracking.mlflow_sink import sync
from shardlab.tracking.points import launcher_of
from shardlab.tracking.provenance import launcher
from shardlab.tracking.record import EventLog, RunRecord
from shardlab.tracking.store import Store, open_store
from shardlab.tracking.sweep_parent import end_sweep, ship_sweep


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAIN_RANK", "prepare"):
        monkeypatch.setattr(run_module, name, getattr(run_module, name))
    stand_in(run_module)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    open_store(Store(uri, "e"))
    return uri


def shown(store: str, experiment: str = "e") -> dict[str, Any]:
    """The runs of an MLflow experiment, by name."""
    client, number = client_of(store, experiment)
    return {run.info.run_name: run for run in client.search_runs([number])}


def client_of(store: str, experiment: str = "e") -> tuple[Any, str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return client, found.experiment_id


def tracked(store: str, name: str) -> list[str]:
    return ["tracking=mlflow", f"tracking.uri={store}", "tracking.experiment=e", f"tracking.run_name={name}"]


def test_a_finished_run_is_shown_whole_and_shipping_again_adds_nothing(
    store: str, capfd: pytest.CaptureFixture[str]
) -> None:
    record = run(composed("none", *tracked(store, "whole")))
    said = capfd.readouterr()
    assert f"mlflow ui --backend-store-uri {store}" in said.out
    assert not [line for line in said.err.splitlines() if not line.startswith("whole: ")]  # nothing of MLflow's own

    log = EventLog(record.folder / "events.jsonl")
    log.write("eval", split="test", step=4, loss=math.nan, perplexity=math.inf)  # shipped late, as after a crash
    log.close()
    client, _ = client_of(store)
    counts = []
    for _ in range(2):
        sync(Path("run"))
        found = shown(store)["whole"]
        histories = {key: client.get_metric_history(found.info.run_id, key) for key in found.data.metrics}
        counts.append({key: len(points) for key, points in histories.items()})
    assert counts[0] == counts[1]
    assert counts[0]["train/loss"] == 4
    assert counts[0]["test/loss"] == counts[0]["test/perplexity"] == 1

    assert [(point.step, point.value) for point in histories["train/loss"]] == list(enumerate(record.losses, 1))
    assert math.isnan(found.data.metrics["test/loss"])
    assert found.data.metrics["val/perplexity"] == 1.3
    assert found.data.metrics["perf/peak_memory_rank1"] == 101
    assert found.data.metrics["perf/tokens_per_s"] == 1000
    assert found.info.status == "FINISHED"
    assert found.data.params["trainer.global_batch"] == "20"
    assert found.data.params["strategy.replicate"] == "2"
    assert found.data.tags["shardlab.id"] == record.id
    assert found.data.tags["shardlab.parameters"] == "9"
    assert found.data.tags["mlflow.user"]
    assert found.data.tags["mlflow.source.name"]
    assert found.data.tags["mlflow.source.type"] == "LOCAL"
    assert found.data.tags["shardlab.folder"] == str(Path("run").absolute())
    assert found.data.tags["shardlab.config_hash"] == record.provenance["config_hash"]
    assert launcher_of(found.data.tags) == {key: str(value) for key, value in launcher().items()}
    assert not {"shardlab.job", "shardlab.overrides"} & found.data.tags.keys()
    [data] = found.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("pydoc", FINGERPRINT)
    files = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert files == {"config.yaml", "provenance.json", "events.jsonl", "rank-1.jsonl"}


def test_a_failed_run_is_shown_as_failed_with_its_logs(store: str) -> None:
    with pytest.raises(RunFailed):
        run(composed("kill", *tracked(store, "bad")))
    found = shown(store)["bad"]
    assert found.info.status == "FAILED"
    assert found.data.tags["shardlab.reason"] == "rank 1 was killed by SIGKILL (out of memory?)"
    client, _ = client_of(store)
    assert "rank-1.log" in {file.path for file in client.list_artifacts(found.info.run_id)}


def test_a_sweep_is_a_parent_over_its_jobs_with_their_summary(store: str) -> None:
    sweep = sweep_of("sweeps/a", ["shardlab", "train", "-m", "seed=1,2"], ["seed=1,2"])
    run(composed("none", *tracked(store, "job"), "run_dir=sweeps/a/0"), job=job_of(sweep, 0, "seed=1"))
    with pytest.raises(RunFailed):
        run(composed("leave", *tracked(store, "job"), "run_dir=sweeps/a/1"), job=job_of(sweep, 1, "seed=2"))
    assert shown(store)["sweep a"].info.status == "RUNNING"
    ended(sweep, 0, "finished", 0.3)
    ended(sweep, 1, "failed")
    ended(sweep, 2, "refused")
    assert sweep.finish(sweep.rows.read(), failed=True) == "FAILED"
    runs = shown(store)
    parent = runs["sweep a"]
    assert parent.info.status == "FAILED"
    for number, own in enumerate(["seed=1", "seed=2"]):
        tags = runs[f"job {own}"].data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert (tags["shardlab.job"], tags["shardlab.overrides"]) == (str(number), own)
    tags = parent.data.tags
    assert (tags["shardlab.command"], tags["shardlab.space"]) == ("shardlab train -m seed=1,2", "seed=1,2")
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("shardlab train -m", "LOCAL")
    assert tags["mlflow.user"]
    assert tags["shardlab.folder"] == str(Path("sweeps/a").absolute())
    assert launcher_of(tags) == {key: str(value) for key, value in launcher().items()}
    [data] = parent.inputs.dataset_inputs  # one, though both jobs have said so
    assert (data.dataset.name, data.dataset.digest) == ("pydoc", FINGERPRINT)
    assert parent.data.metrics == {
        "sweep/jobs_finished": 1,
        "sweep/jobs_failed": 1,
        "sweep/jobs_killed": 0,
        "sweep/jobs_refused": 1,
        "sweep/best_val_loss": 0.3,
    }


def test_a_resumed_sweep_runs_again_and_its_end_shows_the_best_job_and_the_pictures(store: str) -> None:
    where = Store(store, "e")
    client, _ = client_of(store)
    for attempt in range(2):
        sweep = sweep_of("sweeps/c")
        sweep.claim()
        run(composed("none", *tracked(store, "tried"), f"run_dir=sweeps/c/{attempt}"), job=job_of(sweep, attempt))
        parent = shown(store)["sweep c"]
        assert parent.info.status == "RUNNING"
        for name in ["sweep.csv", "parallel.png"][: attempt + 1]:
            (sweep.folder / name).touch()
        [found] = end_sweep(sweep.folder, "KILLED", {"sweep/best": 2.0 - attempt}, {"shardlab.best_job": str(attempt)})
        assert found == where
        assert ship_sweep(sweep.folder, where) == parent.info.run_id
        parent = shown(store)["sweep c"]
        assert (parent.info.status, parent.data.metrics) == ("KILLED", {"sweep/best": 2.0 - attempt})
        best = client.get_run(parent.data.tags["shardlab.best_run"])
        sweep.release()
        assert best.data.tags["shardlab.job"] == parent.data.tags["shardlab.best_job"] == str(attempt)
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files == {"sweep.csv", "parallel.png"}


def test_jobs_at_the_same_time_have_one_parent(store: str) -> None:
    """Threads of one process, each with its own sink."""
    sweep = sweep_of("sweeps/d")
    records: list[RunRecord] = []

    def work(number: int) -> None:
        records.append(run(made[number], job=job_of(sweep, number)))

    made = [composed("none", *tracked(store, f"at once {n}"), f"run_dir=sweeps/d/{n}") for n in range(3)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.status for record in records] == ["FINISHED"] * 3
    client, number = client_of(store)
    found = client.search_runs([number], "attributes.run_name LIKE 'at once %'")
    assert {(run.info.status, len(client.get_metric_history(run.info.run_id, "train/loss"))) for run in found} == {
        ("FINISHED", 4)
    }
    [parent] = {run.data.tags["mlflow.parentRunId"] for run in found}
    assert [run.info.run_id for run in client.search_runs([number], "attributes.run_name = 'sweep d'")] == [parent]


def test_a_dead_server_costs_one_warning_and_sync_ships_all_later(
    store: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    dead = "http://me:secret@127.0.0.1:9"
    sweep = sweep_of("sweeps/b")
    record = run(composed("none", *tracked(dead, "later"), "run_dir=sweeps/b/0"), job=job_of(sweep, 0))
    ended(sweep, 0, "finished", 0.3)
    assert sweep.finish(sweep.rows.read()) == "FINISHED"
    said = capfd.readouterr()
    [warning] = [line for line in said.err.splitlines() if not line.startswith("later: ")]
    assert warning.startswith("warning: MLflow at http://127.0.0.1:9 can't be reached; ")
    assert warning.endswith("the run record is whole, to ship it later: shardlab sync sweeps/b/0")
    assert "secret" not in said.err + said.out
    assert len(record.steps) == 4

    with pytest.raises(ShardlabError, match=r"MLflow at http://127.0.0.1:9 can't be reached"):
        sync(record.folder)
    # The server comes back: here, by way of the config's uri.
    for path in (record.folder / "config.yaml",):
        path.write_text(path.read_text().replace("http://127.0.0.1:9", store))
    assert sync(record.folder) > 0
    runs = shown(store)
    assert runs["later"].info.status == runs["sweep b"].info.status == "FINISHED"
    assert runs["later"].data.tags["mlflow.parentRunId"] == runs["sweep b"].info.run_id
    assert runs["sweep b"].data.metrics["sweep/best_val_loss"] == 0.3


def test_a_run_from_python_leaves_the_users_mlflow_as_it_was(store: str) -> None:
    """Once their own MLflow was left with one retry, and without its log lines."""
    import mlflow  # noqa: F401 - it sets its loggers' levels

    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic", "urllib3")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
    before = dict(os.environ)
    run(composed("none", *tracked(store, "guest")))
    assert dict(os.environ) == before
    assert [logger.level for logger in loggers] == [logging.INFO] * 3


def test_a_file_store_is_explained(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    record = run(composed("none", *tracked("./mlruns", "files")))
    assert record.status == "FINISHED"
    assert "tracking.uri=sqlite:///mlflow.db would work; the run record is whole" in capfd.readouterr().err


def test_a_run_without_tracking_can_be_shipped_later(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(composed("none", "tracking.run_name=quiet"))
    assert not (record.folder / "mlflow.json").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "e")
    sync(record.folder)
    link = json.loads((record.folder / "mlflow.json").read_text())
    assert (link["uri"], link["run_id"]) == (store, shown(store)["quiet"].info.run_id)


def test_a_bare_mlflow_opens_our_database_and_not_mlruns(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking._tracking_service import utils

    folder = Path(store.removeprefix("sqlite:///")).parent
    assert (folder / "mlruns").is_dir()
    monkeypatch.chdir(folder)
    assert utils._get_default_tracking_uri() == "sqlite:///mlflow.db"
