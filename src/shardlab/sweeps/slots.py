"""Slots: how many jobs run at once, and which cores and GPUs are each one's own.

Two jobs on the same cores would measure each other. So the machine is dealt out once, and a slot is taken by the
next job as soon as its last has ended. A job is a thread of the launcher: its ranks are processes anyway, and all of
them come from one fork server that has torch loaded.
"""

import os
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shardlab.config.check import gpu_names
from shardlab.errors import ShardlabError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Slot:
    """The part of the machine that one job has to itself. cores: numbers; gpus: as CUDA_VISIBLE_DEVICES names them."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]

    @property
    def environment(self) -> Mapping[str, str]:
        """What its ranks' environment must say."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


def slots(parallel: int) -> list[Slot]:
    """The machine in that many equal parts; what is left over when they don't divide it stays idle.

    Raises ShardlabError where there is not a core for each.
    """
    cores, gpus = sorted(os.sched_getaffinity(0)), gpu_names()
    if parallel > len(cores):
        raise ShardlabError(
            f"sweep.parallel={parallel}: each job needs a core of its own, and {len(cores)} can be used here; "
            f"at most {len(cores)} would do"
        )
    each, gpus_each = len(cores) // parallel, len(gpus) // parallel
    return [
        Slot(tuple(cores[n * each : (n + 1) * each]), tuple(gpus[n * gpus_each : (n + 1) * gpus_each]))
        for n in range(parallel)
    ]


class Pool:
    """Runs each piece of work in a thread, in the first slot that is free; in the order of submission."""

    def __init__(self, slots: list[Slot]) -> None:
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(len(slots), thread_name_prefix="job")

    def submit(self, work: Callable[[Slot], Result]) -> "Future[Result]":
        """Have the work done; returns at once."""

        def with_slot() -> Result:
            slot = self._free.get()
            try:
                return work(slot)
            finally:
                self._free.put(slot)

        return self._threads.submit(with_slot)

    def close(self) -> None:
        """Begin nothing more, and wait for what runs."""
        self._threads.shutdown(wait=True, cancel_futures=True)
