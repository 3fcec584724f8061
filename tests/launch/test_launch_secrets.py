"""A password in a sweep's command is nowhere in what the sweep leaves: once Hydra's escapes hid it from us."""

from pathlib import Path

import pytest
from launch_processes import Launcher

CODE = """
import sys
from launch_parts import stand_in
from shardlab.cli import main
from shardlab.launch import run
stand_in(run)
sys.exit(main(["train", "-m", "strategy=ddp", "model.name=none", "hydra.sweep.dir=all", *sys.argv[1:]]))
"""

WORDS = [
    ("seed=1,2", "tracking.uri=http://me:secret@127.0.0.1:9/"),
    ("seed=1,2", "tracking.uri='http://me:secret@127.0.0.1:9/'"),
    ("seed=1", "tracking.uri=http://me:secret@127.0.0.1:9/"),
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_sweep_leaves_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    launcher = Launcher(CODE, tmp_path, *words)
    try:
        assert launcher.end(seconds=180) == 0, launcher.output
    finally:
        launcher.kill()
    assert "127.0.0.1:9" in (tmp_path / "all" / "multirun.yaml").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path.relative_to(tmp_path)) for path in files if b"secret" in path.read_bytes()] == []
