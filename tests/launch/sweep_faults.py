"""A sweep's jobs that go wrong: the real training, of which one rank meets the fault that the job's seed asks for."""

import os
import signal
import sys
import time
from pathlib import Path

from shardlab.config.schema import Config
from shardlab.training.place import Place

COUNT = "trained.txt"
"""In the folder where the sweep was started: a line for each job whose ranks began, with its seed."""

FAULTS = {101: "exception", 102: "kill", 103: "loop", 104: "exit"}
"""The fault that comes with a seed."""


def train_rank(place: Place, config: Config, run_dir: Path, data_dir: Path) -> None:
    """shardlab.training.loop.train_rank, after the fault of rank 1 if the seed has one."""
    from shardlab.training import loop

    if place.rank == 0:
        with Path(COUNT).open("a") as file:
            file.write(f"{config.seed}\n")
    mood = os.environ.get("SHARDLAB_TEST_MOOD", "faulty")
    fault = FAULTS.get(config.seed, "") if mood == "faulty" and place.rank == place.ranks - 1 else ""
    real = loop.train_step

    def step(*arguments: object) -> object:
        if mood == "slow":
            time.sleep(2)
        meet(fault)
        return real(*arguments)  # type: ignore[arg-type]

    loop.train_step = step  # type: ignore[assignment]
    loop.train_rank(place, config, run_dir, data_dir)


def meet(fault: str) -> None:
    """Go wrong."""
    if fault == "exception":
        raise ValueError("the loss is made of cheese")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        sys.exit(0)
    while fault == "loop":
        pass
