"""Noticing that a run hangs, and which rank is to blame.

Each rank counts its small pieces of work (training/pulse.py); the launcher looks at the counts. A rank whose count
stands still for `runtime.timeout` is silent. That alone is no blame: ranks wait for each other in collectives, so one
that hangs silences the others, and one that works alone for long (a large model to be saved) silences them too. So a
silent rank is asked where it is. One that is stopped, or doing anything but waiting for other ranks, hangs. Those
that wait are blamed only once all are silent, and then it is the one that has been silent longest.

Time in which the launcher itself did not run (Ctrl-Z, a machine put to sleep, a slow answer) is not counted.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from shardlab.launch.cause import Hang
from shardlab.launch.stacks import Stack, ask_stacks, read_stack, state
from shardlab.training import pulse

LONGEST_LOOK = 1.0
"""Seconds between two looks that count; what is beyond them, the launcher was not there to see."""

STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits inside the kernel (a disk, a network file system or a driver)",
}
"""What keeps a rank from answering, in words."""


STOPPED, GONE = ("T", "t"), ("X", "Z")


class Silence:
    """For how long each rank's count has stood still. now: of a monotonic clock, in seconds."""

    def __init__(self, now: float) -> None:
        self.seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._now = now

    def look(self, now: float, counts: Mapping[int, int]) -> None:
        """Take in the counts of the ranks that are still there."""
        elapsed = min(now - self._now, LONGEST_LOOK)
        self._now = now
        self.seconds = {
            rank: self.seconds.get(rank, 0.0) + elapsed if count == self._counts.get(rank, 0) else 0.0
            for rank, count in counts.items()
        }
        self._counts = dict(counts)


def guilty(
    silence: Mapping[int, float], timeout: float, states: Mapping[int, str], stacks: Mapping[int, Stack]
) -> int | None:
    """The rank that hangs, or None if those that are silent wait for one that works.

    silence: seconds, of each rank that is there; states: of the kernel's; stacks: of those that answered
    """
    silent = sorted((rank for rank in silence if silence[rank] >= timeout), key=lambda rank: -silence[rank])
    stopped = [rank for rank in silent if states[rank] in STOPPED]
    busy = [rank for rank in silent if rank not in stacks or not stacks[rank].waits_for_ranks]
    everyone = silent if len(silent) == len(silence) else []
    return next(iter([*stopped, *busy, *everyone]), None)


Elsewhere = Callable[[set[int]], Mapping[int, tuple[str, str]]]
"""Asks ranks of other hosts: the kernel's letter and the stacks (stacks.py) of each that answers; "" if it has none."""


class HangWatch:
    """The launcher's watch over the ranks of one launch.

    folder: where pulses and stacks go; log_dir: where rank-N.log lies, to which the stack of a rank is added
    elsewhere: see Elsewhere; None where all ranks are on this machine
    """

    def __init__(
        self,
        folder: Path,
        log_dir: Path,
        ranks: int,
        timeout: float,
        now: float,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        pulse.make(folder / pulse.FILE, ranks)
        self._counts = pulse.counts(folder / pulse.FILE)
        self._folder, self._log_dir, self._timeout = folder, log_dir, timeout
        self._silence = Silence(now)
        self._next = timeout
        self._elsewhere = elsewhere

    def hear(self, rank: int, count: int) -> None:
        """Take in the pulse of a rank of another host."""
        self._counts[rank] = count

    def look(self, now: float, processes: Mapping[int, int | None]) -> tuple[int, Hang] | None:
        """The rank that hangs, if one does. processes: numbers of the running ranks, by rank; None on another host."""
        self._silence.look(now, {rank: self._counts[rank] for rank in processes})
        seconds = self._silence.seconds
        longest = max(seconds.values(), default=0.0)
        if longest < self._timeout:
            self._next = self._timeout
            return None
        if longest < self._next and min(seconds.values()) < self._timeout:
            return None
        self._next = longest + self._timeout / 4  # asked already: it waits for one that works
        states, stacks = self._ask(processes)
        self._silence.look(now, {rank: self._counts[rank] for rank in processes})  # one may have gone on meanwhile
        rank = guilty(self._silence.seconds, self._timeout, states, stacks)
        if rank is None or any(letter in GONE for letter in states.values()):  # its end is about to be noticed
            return None
        for each, stack in stacks.items():
            self._log(each, stack.text)
        return rank, self._hang(now, rank, states[rank], stacks)

    def _ask(self, processes: Mapping[int, int | None]) -> tuple[dict[int, str], dict[int, Stack]]:
        """How each rank is, and the stacks of those that answer."""
        here = {rank: process for rank, process in processes.items() if process is not None}
        states = dict.fromkeys(processes, "S")
        stacks: dict[int, Stack] = {}
        others = processes.keys() - here.keys()
        if others and self._elsewhere is not None:
            for rank, (letter, text) in self._elsewhere(set(others)).items():
                states[rank] = letter
                if (stack := read_stack(text)) is not None:
                    stacks[rank] = stack
        stacks |= ask_stacks(
            {rank: process for rank, process in here.items() if state(process) not in STOPPED}, self._folder
        )
        return states | {rank: state(process) for rank, process in here.items()}, stacks

    def _hang(self, now: float, rank: int, letter: str, stacks: Mapping[int, Stack]) -> Hang:
        stack = stacks.get(rank)
        where = STATES.get(letter, "it does not say where")
        if stack is not None:
            where = f"in {stack.place}"
            if stack.waits_for_ranks:
                where += ", and all ranks wait for each other"
        return Hang(now, self._timeout, where, "" if stack is None else stack.text)

    def _log(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError), (self._log_dir / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
            log.write(f"the run hangs; this rank's threads as the launcher ends it:\n{text}\n")
