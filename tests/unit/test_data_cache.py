"""The cache of prepared data: one builder, no half-written folder, nothing out of date."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from shardlab.config.schema import Task
from shardlab.data import cache
from shardlab.data.cache import build_once, cache_root, is_whole, prepared_folder
from shardlab.data.prepared import Meta, read_meta, write_tokens
from shardlab.errors import ShardlabError

SPAWN = multiprocessing.get_context("spawn")


def slow_build(folder: Path) -> Meta:
    """Writes one split, notes in the folder above that it began, and takes its time for the other."""
    write_tokens(folder, "train", np.arange(100))
    with (folder.parent / "builders").open("a") as notes:
        notes.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    write_tokens(folder, "test", np.arange(7))
    return Meta("pydoc", Task.language_model, 100, 0, {"train": 100, "test": 7}, facts={"entropy": 1.5})


def fast_build(folder: Path) -> Meta:
    """The same data at once."""
    write_tokens(folder, "train", np.arange(100))
    write_tokens(folder, "test", np.arange(7))
    return Meta("pydoc", Task.language_model, 100, 0, {"train": 100, "test": 7}, facts={"entropy": 1.5})


def test_of_two_processes_one_builds_and_both_have_the_result(tmp_path: Path) -> None:
    folder = tmp_path / "pydoc-1"
    builders = [SPAWN.Process(target=build_once, args=(folder, slow_build)) for _ in range(2)]
    for process in builders:
        process.start()
    for process in builders:
        process.join(60)
    assert [process.exitcode for process in builders] == [0, 0]
    assert len((tmp_path / "builders").read_text().split()) == 1
    assert is_whole(folder)


def test_a_killed_builder_leaves_nothing_that_is_taken_for_data(tmp_path: Path) -> None:
    folder = tmp_path / "pydoc-1"
    builder = SPAWN.Process(target=build_once, args=(folder, slow_build))
    builder.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "builders").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(60)
    assert not is_whole(folder)
    assert list(tmp_path.glob("*.building-*"))

    assert build_once(folder, fast_build) == folder
    assert is_whole(folder)
    assert not list(tmp_path.glob("*.building-*"))


def test_a_failed_build_cleans_up_and_passes_its_error_on(tmp_path: Path) -> None:
    def failing(folder: Path) -> Meta:
        write_tokens(folder, "train", np.arange(100))
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        build_once(tmp_path / "pydoc-1", failing)
    assert [path.name for path in tmp_path.iterdir()] == ["pydoc-1.lock"]


def test_a_damaged_folder_is_built_again(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "pydoc-1", fast_build)
    for damage in (
        lambda: (folder / "train.npy").write_bytes(b"short"),
        lambda: (folder / "test.npy").unlink(),
        lambda: (folder / "meta.json").write_text('{"name": "py'),
        lambda: (folder / "meta.json").unlink(),
    ):
        damage()
        assert not is_whole(folder)
        build_once(folder, fast_build)
        assert is_whole(folder)


def test_meta_is_read_back_and_its_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    one, two = (read_meta(build_once(tmp_path / name, fast_build)) for name in ("pydoc-1", "pydoc-2"))
    assert one == two
    assert one.task is Task.language_model
    assert one.facts == {"entropy": 1.5}
    assert len(one.fingerprint) == 16

    def other(folder: Path) -> Meta:
        meta = fast_build(folder)
        write_tokens(folder, "test", np.arange(7)[::-1])
        return meta

    assert read_meta(build_once(tmp_path / "pydoc-3", other)).fingerprint != one.fingerprint


def test_the_key_holds_the_config_the_files_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    one = prepared_folder("pydoc", {"tokens": "words"})
    assert one == prepared_folder("pydoc", {"tokens": "words"})
    assert one != prepared_folder("pydoc", {"tokens": "basic_english"})
    monkeypatch.setattr(cache, "code_digest", lambda name: "another version")
    assert one != prepared_folder("pydoc", {"tokens": "words"})


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDLAB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "shardlab"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "shardlab"
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ShardlabError, match="set SHARDLAB_CACHE"):
        build_once(tmp_path / "file" / "pydoc-1", fast_build)
