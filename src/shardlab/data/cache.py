"""The cache of prepared data: made once by one process, whole or not at all.

A folder's name holds a key of everything its content depends on, the code that makes it included, so nothing in it
is ever out of date. It is built in a folder beside it under a lock and renamed when it is finished: whoever is
killed half way leaves a folder that nobody takes for data, and the next builder removes it. The lock is the
kernel's, so it dies with its holder.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from shardlab.data.prepared import META, Meta, read_meta
from shardlab.errors import ShardlabError


def cache_root() -> Path:
    """Where downloads and prepared data are kept: $SHARDLAB_CACHE, else shardlab/ in the user's cache folder."""
    if named := os.environ.get("SHARDLAB_CACHE"):
        return expanded("SHARDLAB_CACHE", named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardlab"


def expanded(variable: str, named: str) -> Path:
    """The folder that an environment variable names, `~` filled in; ShardlabError for the home of nobody."""
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise ShardlabError(f"{variable}={named}: there is no such user; name a folder") from None


def prepared_folder(name: str, key: Mapping[str, object]) -> Path:
    """The folder of a dataset whose content depends on `key` (plain values) alone."""
    text = json.dumps({"code": code_digest(name), **key}, sort_keys=True)
    return cache_root() / "prepared" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def code_digest(name: str) -> str:
    """sha256 of the source of the modules that make a dataset's tokens: a version number that can't be forgotten."""
    here = Path(__file__).parent
    makers = (f"corpora/{name}.py", "sources.py", "words.py", "wordpiece.py", "permutation.py", "prepared.py")
    return hashlib.sha256(b"".join((here / maker).read_bytes() for maker in makers)).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether a finished folder stands there, with every file at the size it was finished with."""
    try:
        files = read_meta(folder).files
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build_once(folder: Path, build: Callable[[Path], Meta]) -> Path:
    """The folder, built first if it is not there whole; of several processes one builds and the others wait.

    build: writes everything but meta.json into the empty folder it is given, and returns the meta
    """
    if is_whole(folder):
        return folder
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=1)
        except Timeout:
            print(f"{folder.name} is being prepared by another process; waiting for it", file=sys.stderr)
            lock.acquire()
        try:
            if not is_whole(folder):
                _build(folder, build)
        finally:
            lock.release()
    except OSError as error:
        raise ShardlabError(
            f"can't write prepared data to {folder.parent}: {error.strerror or error}; "
            "set SHARDLAB_CACHE to a folder with room that you may write to"
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], Meta]) -> None:
    """Build beside the folder and rename; the lock is held."""
    for rest in (*folder.parent.glob(f"{folder.name}.building-*"), folder):
        if rest.exists():
            shutil.rmtree(rest)
    building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    building.mkdir()
    try:
        meta = build(building)
        written = sorted(path for path in building.iterdir() if path.name != META)
        content = hashlib.sha256()
        for path in written:
            content.update(f"{path.name}\n".encode() + path.read_bytes())
        sizes = {path.name: path.stat().st_size for path in written}
        replace(meta, fingerprint=content.hexdigest()[:16], files=sizes).write(building)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
