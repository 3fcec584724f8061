"""Starting a launcher as a user's command would be, and finding whatever it leaves behind."""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

LIGHT = "from shardlab.launch import fork_server\nfork_server.PRELOAD = fork_server.PRELOAD[:2]\n"
"""Begins the code of a launcher whose ranks don't train: all that training imports takes its fork server seconds."""

WITH_TORCH = f"{LIGHT}fork_server.PRELOAD += ['torch.distributed']\n"
"""The same, for ranks that meet in collectives."""


class Launcher:
    """A Python process of its own session that runs `code`; every process that comes from it carries a mark."""

    def __init__(self, code: str, folder: Path, *words: str) -> None:
        self.mark = f"SHARDLAB_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        path = os.pathsep.join([str(HERE), str(SOURCE), os.environ.get("PYTHONPATH", "")])
        # A test run in a shell's background inherits SIGINT ignored; a user's command does not.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=folder,
            env={**os.environ, name: value, "PYTHONPATH": path},
            stdout=(folder / "output.txt").open("w"),  # a pipe would stay open as long as any descendant
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.output_file = folder / "output.txt"

    def end(self, seconds: float = 20) -> int:
        """Wait for its exit status."""
        return self.process.wait(timeout=seconds)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.output_file.read_text()

    def descendants(self) -> list[int]:
        """The processes alive that carry the mark, itself included."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (entry / "environ").read_bytes()
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if marked and not zombie:
                found.append(int(entry.name))
        return found

    def left_after(self, seconds: float = 3) -> list[int]:
        """The processes that are still alive that long after it ended; [] at once when none is."""
        wait_until(lambda: not self.descendants(), seconds)
        return self.descendants()

    def kill(self) -> None:
        """End whatever is left, for the sake of the next test."""
        for process in self.descendants():
            os.kill(process, 9)
        self.process.wait()


def at_once(*launches: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, each in a thread of its own."""
    ends: list[Any] = [None] * len(launches)

    def end(number: int) -> None:
        try:
            ends[number] = launches[number]()
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=end, args=(number,)) for number in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return ends


def wait_until(claim: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether the claim came true within that time."""
    deadline = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
