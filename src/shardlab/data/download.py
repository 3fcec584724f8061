"""Downloading one published file from the first mirror that serves it whole.

Mirrors are asked in order, the next one as soon as one fails or keeps silent for its share of the patience (as
browsers race addresses, RFC 8305). Asking happens in daemon threads, because the time of a name look-up can't be
limited otherwise: a machine without a network learns so within the patience, a slow one still gets all of it.
What arrives is checked by size and sha256 before it is renamed to its name.
"""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

if TYPE_CHECKING:
    from shardlab.data.sources import SourceFile

STALL = 30.0
"""Seconds without a byte after which a download that has begun is given up."""

CHUNK = 1 << 18


class UnreachableError(Exception):
    """No mirror served the file; the text says why, mirror by mirror."""


def download(file: "SourceFile", target: Path, *, patience: float) -> None:
    """Fetch a file to `target`; of several processes one does and the others wait. UnreachableError if no mirror can.

    patience: seconds in which some mirror must answer; OSError is about writing to this machine's disk
    """
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_file():
            return
        for rest in target.parent.glob(f"{target.name}.part-*"):
            rest.unlink()
        failures: dict[str, str] = {}
        while waiting := [url for url in file.mirrors if url not in failures]:
            with _first_answer(waiting, patience, failures) as answer:
                if answer and _receive(*answer, file, target, failures):
                    return
        raise UnreachableError(
            "; ".join(f"{urlsplit(url).netloc}: {why}" for url, why in failures.items()) or "no mirror"
        )


@contextmanager
def _first_answer(
    urls: list[str], patience: float, failures: dict[str, str]
) -> Iterator[tuple[str, HTTPResponse] | None]:
    """The first mirror that answers, with its open response; None if none does. Failures are noted by address."""
    answers: SimpleQueue[tuple[str, HTTPResponse | str]] = SimpleQueue()
    decided = threading.Event()

    def ask(url: str) -> None:
        try:
            request = Request(url, headers={"User-Agent": "shardlab"})
            answer: HTTPResponse | str = urlopen(request, timeout=STALL)
        except (OSError, HTTPException, ValueError) as error:
            answer = _reason(error)
        if decided.is_set() and not isinstance(answer, str):
            answer.close()
        else:
            answers.put((url, answer))

    end = time.monotonic() + patience
    unasked, silent = list(urls), set[str]()
    while unasked or silent:
        if unasked:
            url = unasked.pop(0)
            silent.add(url)
            threading.Thread(target=ask, args=(url,), daemon=True).start()
        left = end - time.monotonic()
        try:
            url, answer = answers.get(timeout=max(0.0, min(left, patience / len(urls)) if unasked else left))
        except Empty:
            if unasked:
                continue
            failures.update(dict.fromkeys(silent, f"no answer in {patience:g} s"))
            break
        silent.discard(url)
        if isinstance(answer, str):
            failures[url] = answer
            continue
        decided.set()
        with answer:
            yield url, answer
        return
    decided.set()
    yield None


def _receive(url: str, response: HTTPResponse, file: "SourceFile", target: Path, failures: dict[str, str]) -> bool:
    """Write a response to `target` if it is the file, whole; otherwise note why it is not."""
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    digest, size = hashlib.sha256(), 0
    try:
        with part.open("wb") as stream, _progress(file) as advance:
            while size <= file.size and (chunk := _read(url, response, failures)):
                stream.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                advance(len(chunk))
        if url in failures:
            return False
        if size < file.size:
            failures[url] = f"ended after {size} of {file.size} bytes"
        elif size > file.size:
            failures[url] = f"more than the {file.size} bytes of {file.name}"
        elif digest.hexdigest() != file.sha256:
            failures[url] = f"another file: sha256 {digest.hexdigest()}, expected {file.sha256}"
        else:
            part.rename(target)
            return True
        return False
    finally:
        part.unlink(missing_ok=True)


def _read(url: str, response: HTTPResponse, failures: dict[str, str]) -> bytes:
    """The next bytes; none at the end or, with the reason noted, when the connection breaks."""
    try:
        return response.read(CHUNK)
    except (OSError, HTTPException) as error:
        failures[url] = _reason(error)
        return b""


def _reason(error: Exception) -> str:
    """A failure in a few words."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, URLError):
        return str(getattr(error.reason, "strerror", None) or error.reason)
    return str(error) or type(error).__name__


@contextmanager
def _progress(file: "SourceFile") -> Iterator[Callable[[int], object]]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda received: None
        return
    from tqdm import tqdm

    with tqdm(total=file.size, unit="B", unit_scale=True, desc=file.name, leave=False) as bar:
        yield bar.update
