"""A password in a sweep's command is nowhere in what the sweep leaves: once Hydra's escapes hid it from us."""

from pathlib import Path

import pytest
from launch_processes import LIGHT, Launcher

WORDS = [
    ("seed=1,2", "tracking.uri=http://me:secret@127.0.0.1:9/"),
    ("seed=1,2", "tracking.uri='http://me:secret@127.0.0.1:9/'"),
    ("seed=1", "tracking.uri=http://me:secret@127.0.0.1:9/"),
]

CODE = f"""
import sys
from launch_parts import stand_in
from shardlab.cli import main
from shardlab.launch import run
stand_in(run)
fixed = ["train", "-m", "strategy=ddp", "model.name=none"]
sys.exit(max(main([*fixed, f"hydra.sweep.dir=all{{n}}", *words]) for n, words in enumerate({WORDS})))
"""


def test_a_sweep_leaves_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one launcher: it is MLflow's import that takes time."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    launcher = Launcher(LIGHT + CODE, tmp_path)
    try:
        assert launcher.end(seconds=180) == 0, launcher.output
    finally:
        launcher.kill()
    for number in range(len(WORDS)):
        assert "127.0.0.1:9" in (tmp_path / f"all{number}" / "multirun.yaml").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path.relative_to(tmp_path)) for path in files if b"secret" in path.read_bytes()] == []
