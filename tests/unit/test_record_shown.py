"""What leaves the record: points, params, stores, and no password. No MLflow is needed for any of it."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardlab.config.schema import TrackingConfig
from shardlab.tracking import sweep_parent
from shardlab.tracking.points import params, points, tags_of
from shardlab.tracking.provenance import redact_file, without_credentials
from shardlab.tracking.store import Store, problem, store_of, with_credentials

POINTS = [
    # event                                                              metrics
    (
        {"event": "step", "step": 3, "loss": 2.0, "grad_norm": None, "lr": 0.5, "epoch": 0, "tokens": 50, "seconds": 2},
        {
            "train/loss": 2.0,
            "train/lr": 0.5,
            "train/epoch": 0.0,
            "perf/tokens_per_s": 25.0,
            "perf/step_seconds": 2.0,
        },
    ),
    (
        {"event": "step", "step": 3, "grad_norm": math.inf, "loss_scale": 8.0, "skipped": True},
        {"train/grad_norm": sys.float_info.max, "train/loss_scale": 8.0},
    ),
    (
        {"event": "eval", "step": 3, "split": "val", "loss": math.inf, "perplexity": -math.inf},
        {"val/loss": sys.float_info.max, "val/perplexity": -sys.float_info.max},
    ),
    ({"event": "eval", "step": 3, "split": "test", "accuracy": 0.5}, {"test/accuracy": 0.5}),
    ({"event": "best", "step": 3, "loss": 1.0}, {"val/best_loss": 1.0}),
    ({"event": "rank", "rank": 1, "peak_memory": 8, "device": "cpu"}, {"perf/peak_memory_rank1": 8.0}),
    ({"event": "start", "total_steps": 9}, {}),
]


@pytest.mark.parametrize(("event", "metrics"), POINTS)
def test_an_event_becomes_points_at_its_step_and_time(event: dict[str, Any], metrics: dict[str, float]) -> None:
    found = list(points({**event, "time": 12.5}))
    assert {point.key: point.value for point in found} == metrics
    assert {(point.timestamp, point.step) for point in found} <= {(12500, event.get("step", 0))}


def test_a_loss_that_is_no_number_stays_one() -> None:
    [point] = list(points({"event": "best", "time": 1.0, "step": 1, "loss": math.nan}))
    assert math.isnan(point.value)


def test_params_are_the_leaves_and_long_ones_are_named_instead_of_cut() -> None:
    config = {
        "optimizer": {"kwargs": {"betas": [0.9, 0.95]}, "lr": 1e-3},
        "clip": None,
        "test": True,
        "long": "x" * 6001,
    }
    values, long = params({**config, "empty": {}})
    assert values == {
        "optimizer.kwargs.betas.0": "0.9",
        "optimizer.kwargs.betas.1": "0.95",
        "optimizer.lr": "0.001",
        "clip": "null",
        "test": "true",
        "empty": "{}",
    }
    assert long == ["long"]


def test_start_and_end_become_tags() -> None:
    start = {"event": "start", "time": 1.0, "mesh": "ddp2", "dataset": {"rows": 3}}
    assert tags_of(start) == {"shardlab.mesh": "ddp2"}
    assert tags_of({"event": "pruned", "time": 1.0, "step": 30}) == {"shardlab.pruned": "30"}
    assert tags_of({"event": "end", "time": 1.0, "status": "FAILED", "reason": "why"}) == {"shardlab.reason": "why"}
    assert tags_of({"event": "end", "time": 1.0, "status": "FINISHED", "reason": None}) == {}


SECRETS = [
    ("tracking.uri=http://me:secret@host:5000/x", "tracking.uri=http://host:5000/x"),
    ("uri: 'postgresql://me:se%40c@host/db'", "uri: 'postgresql://host/db'"),
    ("http://me:se@cret@host", "http://host"),
    ("https://token@host/x?y=a@b", "https://host/x?y=a@b"),
    ("sqlite:////home/a@b/c.db", "sqlite:////home/a@b/c.db"),
    ("mail me@host", "mail me@host"),
    (r"tracking.uri=http\://me\:secret@host\:5000/x", r"tracking.uri=http\://host\:5000/x"),
    (r"uri=http\://me\:s\=e\,c\ r\(e\\t@host", r"uri=http\://host"),
    (r'["uri=http\\://me\\:s\\=ecret@host", "a@b"]', r'["uri=http\\://host", "a@b"]'),
    (r"uri='http://me:it\'s@host'", "uri='http://host'"),
    (r"http\://me\:secret\\@host", r"http\://host"),
    (r"no=http\://host\:5000 and me@host", r"no=http\://host\:5000 and me@host"),
    (r"http\://a.b/c\:d@e", r"http\://a.b/c\:d@e"),
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_a_password_in_a_uri_is_taken_out(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_a_text_of_backslashes_is_searched_in_no_time() -> None:
    assert without_credentials("a://" + "\\" * 10_000).endswith("\\")


def test_a_file_is_rewritten_without_its_passwords(tmp_path: Path) -> None:
    path = tmp_path / "multirun.yaml"
    redact_file(path)
    assert not path.exists()
    path.write_text("a: ü\nuri: http://me:secret@host\n", encoding="utf-8")
    redact_file(path)
    assert path.read_text(encoding="utf-8") == "a: ü\nuri: http://host\n"
    redact_file(path)
    assert [each.name for each in tmp_path.iterdir()] == ["multirun.yaml"]


STORES = [
    # config's uri, experiment     environment             store
    (None, None, {}, "sqlite:///HERE/mlflow.db", "shardlab"),
    (None, None, {"MLFLOW_TRACKING_URI": "http://h", "MLFLOW_EXPERIMENT_NAME": "e"}, "http://h", "e"),
    ("http://g", "f", {"MLFLOW_TRACKING_URI": "http://h", "MLFLOW_EXPERIMENT_NAME": "e"}, "http://g", "f"),
    ("sqlite:///sub/my.db", None, {}, "sqlite:///HERE/sub/my.db", "shardlab"),
    ("sqlite:////abs/my.db", None, {}, "sqlite:////abs/my.db", "shardlab"),
    ("mlruns", None, {}, "HERE/mlruns", "shardlab"),
]


@pytest.mark.parametrize(("uri", "experiment", "environment", "where", "name"), STORES)
def test_explicit_keys_win_over_the_environment_and_paths_are_absolute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uri: str | None,
    experiment: str | None,
    environment: dict[str, str],
    where: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for key in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    store = store_of(TrackingConfig(uri=uri, experiment=experiment))
    assert store == Store(where.replace("HERE", str(tmp_path)), name)


def test_a_link_without_password_takes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host")
    assert with_credentials(Store("http://host", "e")).uri == "http://me:secret@host"
    assert with_credentials(Store("http://other", "e")).uri == "http://other"


def test_a_problem_is_one_line_with_advice_and_no_password() -> None:
    error = RuntimeError("no route to\nhttp://me:secret@host")
    assert (
        problem(Store("http://me:secret@host", "e"), error) == "MLflow at http://host failed: no route to http://host"
    )
    files = problem(Store("/x/mlruns", "e"), RuntimeError("set MLFLOW_ALLOW_FILE_STORE=true"))
    assert "tracking.uri=sqlite:///mlflow.db would work" in files


def test_a_sweeps_store_is_found_again_whatever_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with a space once became another store."""

    class Client:
        """An MLflow without any run, that makes number 7."""

        def search_runs(self, *arguments: object, **keywords: object) -> list[object]:
            return []

        def create_run(self, *arguments: object, **keywords: object) -> object:
            return SimpleNamespace(info=SimpleNamespace(run_id="7"))

        def log_batch(self, *arguments: object, **keywords: object) -> None:
            pass

        update_run = log_batch

    store = Store(f"sqlite:///{tmp_path}/my runs/mlflow.db", "my experiment")
    monkeypatch.setattr(sweep_parent, "open_store", lambda store: (Client(), "1"))
    sweep_parent.begin_sweep(tmp_path, {"id": "abc", "command": ["shardlab"], "space": []})
    for _ in range(2):
        assert sweep_parent.ship_sweep(tmp_path, store) == "7"
    assert sweep_parent.end_sweep(tmp_path, "FINISHED", {}) == [store]
