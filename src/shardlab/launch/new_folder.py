"""Where a run's or a sweep's folder is to be: whether it can be there, and what is taken back if nothing came of it."""

import contextlib
import os
from pathlib import Path

from shardlab.errors import ShardlabError

LONGEST_NAME, LONGEST_PATH = 255, 4000
"""Bytes that Linux takes for a name, and for a path, less what a run's own files need."""


def check_place(folder: Path, key: str) -> None:
    """Raise ShardlabError if there can be no such folder. key: what the user calls it."""
    whole = Path(os.path.abspath(folder))
    size = len(os.fsencode(whole))
    if size > LONGEST_PATH or any(len(os.fsencode(name)) > LONGEST_NAME for name in whole.parts):
        raise ShardlabError(f"{key}={str(folder)[:40]}... is too long: {size} bytes; give a shorter one")
    if "\0" in str(folder):
        raise ShardlabError(f"{key}={str(folder)!r} can't be a folder's name: it holds a zero byte")
    for each in (whole, *whole.parents):
        if os.path.isdir(each):
            return
        if os.path.lexists(each):
            raise ShardlabError(f"{key}={folder} can't be a folder: {each} is there and is none; give another")


def new_folders(folder: Path, key: str = "hydra.sweep.dir") -> list[Path]:
    """The folder and those above it that don't exist, innermost first: what making it will make.

    Raises ShardlabError if it can't be made. key: what the user calls it
    """
    check_place(folder, key)
    whole = Path(os.path.abspath(folder))
    return [each for each in (whole, *whole.parents) if not each.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that Hydra made for a run that never was, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for each in folders:
            each.rmdir()
