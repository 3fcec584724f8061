"""Where a corpus's files come from, and that they are the right ones.

In this order: `dataset.path`, $SHARDLAB_DATA, the cache, a download into the cache. A file that is published has a
known size and sha256, and another file under its name is refused wherever it was found: results are compared by
the dataset's name. Before that complaint the file is read, because "line 7: label is '2'" helps more than a sum.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardlab.data.cache import cache_root, expanded
from shardlab.data.download import UnreachableError, download
from shardlab.errors import ShardlabError


@dataclass(frozen=True)
class SourceFile:
    """A published file.

    folder: where it stands below $SHARDLAB_DATA, and below `sources/` in the cache
    size: bytes; mirrors: addresses that serve it as it is, tried in this order
    in_path: False for a file that `dataset.path` may lack, such as a tokenizer's vocabulary
    instead: a setting that works without it, for the error that says it can't be had
    """

    name: str
    folder: str
    size: int
    sha256: str
    mirrors: tuple[str, ...]
    in_path: bool = True
    instead: str = ""

    @property
    def cached(self) -> Path:
        """Where a download of it is kept."""
        return cache_root() / "sources" / self.folder / self.name


def shared_data() -> Path | None:
    """The folder that $SHARDLAB_DATA names, if it is set."""
    named = os.environ.get("SHARDLAB_DATA")
    return expanded("SHARDLAB_DATA", named) if named else None


def find(dataset: str, files: Iterable[SourceFile], path: str | None) -> dict[str, Path]:
    """Those of the files that are on this machine, name -> path; nothing is downloaded.

    path: the user's `dataset.path`, a folder. ShardlabError if it lacks a file: what was asked for by name is not
    silently taken from elsewhere.
    """
    given = Path(path) if path else None
    found = {}
    for file in files:
        if given and not (given / file.name).is_file() and file.in_path:
            what = "has no" if given.is_dir() else "is not a folder, so it has no"
            raise ShardlabError(f"dataset {dataset}: dataset.path={path} {what} {file.name}")
        for place in _places(file, given):
            if place.is_file():
                found[file.name] = place
                break
    return found


def verify(dataset: str, file: SourceFile, path: Path, check: Callable[[Path], None]) -> None:
    """ShardlabError if `path` isn't the published file: by `check` if its format is wrong, else by its sha256."""
    try:
        digest = sha256_of(path)
        if digest == file.sha256:
            return
        check(path)
    except OSError as error:
        raise ShardlabError(f"dataset {dataset}: can't read {path}: {error.strerror or error}") from error
    raise ShardlabError(
        f"dataset {dataset}: {path} is another file than the published {file.name}: sha256 {digest}, "
        f"{path.stat().st_size} bytes, expected {file.sha256}, {file.size} bytes; "
        "put that one there, or remove this one to have it downloaded"
    )


def fetch(dataset: str, files: Iterable[SourceFile], found: Mapping[str, Path], *, patience: float) -> dict[str, Path]:
    """All of the files, those that are not in `found` downloaded into the cache.

    patience: seconds in which some mirror must answer. ShardlabError saying all that was tried, and what to do
    """
    paths = dict(found)
    for file in files:
        if file.name in paths:
            continue
        try:
            download(file, file.cached, patience=patience)
        except UnreachableError as failure:
            raise ShardlabError(_nowhere(dataset, file, str(failure))) from None
        except OSError as error:
            raise ShardlabError(
                f"dataset {dataset}: can't write {file.cached}: {error.strerror or error}; "
                "set SHARDLAB_CACHE to a folder with room that you may write to"
            ) from error
        paths[file.name] = file.cached
    return paths


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def decoded_lines(dataset: str, path: Path) -> list[str]:
    """The lines of a UTF-8 file, cut at newlines alone; ShardlabError with name and line where it is not UTF-8.

    Not `splitlines`: it would cut at characters, such as U+2028, that stand inside a line of these corpora.
    """
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ShardlabError(
            f"dataset {dataset}: {path.name} line {line}: not UTF-8 (byte {content[error.start]:#04x}); "
            "expected a UTF-8 text file"
        ) from None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise ShardlabError(f"dataset {dataset}: {path.name} is empty")
    return lines


def _places(file: SourceFile, given: Path | None) -> list[Path]:
    """Where to look for a file, in order."""
    places = [given / file.name] if given else []
    if shared := shared_data():
        places.append(shared / file.folder / file.name)
    return [*places, file.cached]


def _nowhere(dataset: str, file: SourceFile, failure: str) -> str:
    """The error for a file that is nowhere: one line with everything tried and what would work."""
    shared = shared_data()
    looked = shared / file.folder if shared else "not set"
    advice = [
        "put it and the dataset's other files into a folder and set dataset.path to that"
        if file.in_path
        else f"put it into a folder {file.folder} and set SHARDLAB_DATA to the folder above",
        f"run `shardlab data {dataset}`, which waits longer for an answer",
    ]
    if file.instead:
        advice.append(file.instead)
    return (
        f"dataset {dataset}: {file.name} was not found; looked in $SHARDLAB_DATA ({looked}), "
        f"the cache ({file.cached.parent}); download: {failure}; {', or '.join(advice)}"
    )
