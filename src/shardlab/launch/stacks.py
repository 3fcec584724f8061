"""Where the ranks of a run are: each can be asked for the stacks of its threads at any moment.

Python's own faulthandler answers, from inside a signal handler in C: it needs neither Python's lock nor the main
thread's attention, so a rank that hangs in native code answers too. A rank that is stopped, or that waits in the
kernel without end, can't; the kernel says so (`state`).
"""

import faulthandler
import linecache
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REQUEST = signal.SIGURG
"""Ignored by a process that hasn't set itself up yet, where most signals would end it; and nobody else uses it."""
ANSWER_SECONDS = 2.0
"""How long a rank may take to write down its stacks."""

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen"})
_WAITS = re.compile(r"\.wait\(")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')

_answers: list[object] = []
"""Keeps open the file that faulthandler writes to."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack. file: as Python names it; line: 0 where it is unknown."""

    file: str
    line: int
    function: str

    @property
    def waits_for_ranks(self) -> bool:
        """Whether, being the innermost, it waits for other ranks: torch.distributed itself, or its Work's `wait`."""
        waits = self.file.startswith(_PACKAGE) or "/torch/" in self.file
        return "/torch/distributed/" in self.file or (
            waits and _WAITS.search(linecache.getline(self.file, self.line)) is not None
        )

    @property
    def is_ours(self) -> bool:
        """Whether it says something to a person: this package's code or the user's, not a library's."""
        return self.file.startswith(_PACKAGE) or not self.file.startswith(_LIBRARIES)

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
        return f"{self.function} at {shown}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """What a rank said. threads: of each its frames, innermost first; the main thread is the last."""

    text: str
    threads: list[list[Frame]]

    @property
    def waits_for_ranks(self) -> bool:
        """Whether a thread of it waits inside torch.distributed."""
        return any(frames[0].waits_for_ranks for frames in self.threads)

    @property
    def place(self) -> str:
        """Where the main thread is, for a person: "evaluate at training/evaluation.py:41"."""
        frames = self.threads[-1]
        return str(next((frame for frame in frames if frame.is_ours), frames[0]))


def read_stack(text: str) -> Stack | None:
    """faulthandler's words; None if they hold no frame of Python."""
    threads: list[list[Frame]] = []
    for block in re.split(r"\n\s*\n", text):
        found = [match for line in block.splitlines() if (match := _FRAME.fullmatch(line))]
        if found:
            lines = [(m[1], int(m[2]) if m[2].isdigit() else 0, m[3]) for m in found]
            threads.append([Frame(*line) for line in lines])
    return Stack(text.strip(), threads) if threads else None


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank answers."""
    return folder / f"stack-{rank}"


def tell_on_request(file: Path) -> None:
    """Have this process append the stacks of its threads to a file whenever it is asked."""
    answers = file.open("ab")
    _answers.append(answers)
    faulthandler.register(REQUEST, file=answers.fileno(), all_threads=True)


def ask_stacks(processes: Mapping[int, int], folder: Path) -> dict[int, Stack]:
    """The stacks of ranks, by rank, of those that answer. processes: their numbers, by rank."""
    files = {rank: stack_file(folder, rank) for rank in processes}
    before = {rank: _size(file) for rank, file in files.items()}
    for rank, process in processes.items():
        try:
            os.kill(process, REQUEST)
        except ProcessLookupError:
            before.pop(rank)
    sizes, deadline = before, time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        earlier, sizes = sizes, {rank: _size(files[rank]) for rank in before}
        if sizes == earlier and all(sizes[rank] > before[rank] for rank in before):
            break
    answers = {rank: read_stack(_tail(files[rank], before[rank])) for rank in before}
    return {rank: stack for rank, stack in answers.items() if stack is not None}


def state(process: int) -> str:
    """The kernel's letter for what a process does: R runs, S sleeps, D waits in the kernel, T or t stopped, X gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, start: int) -> str:
    try:
        return file.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
