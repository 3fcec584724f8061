"""Every test works in a folder of its own, so that no run, store or cache of the user's is touched."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

Command = Callable[..., subprocess.CompletedProcess[str]]
"""`shardlab WORDS...` as a real process; see the fixture of that name."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of prepared data for the whole session: preparing once is enough."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLAB_CACHE", str(cache))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # each command would compile our sources anew
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{os.pathsep}{path}" if path else str(SOURCE))


@pytest.fixture
def shardlab() -> Command:
    """Run `shardlab WORDS...` as a user does, in the current folder; returns the finished process with its output."""

    def run(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardlab", *words], capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
