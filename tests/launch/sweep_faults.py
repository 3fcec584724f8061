"""A sweep's jobs that go wrong: one rank meets the fault that the job's seed asks for, in training or in its place."""

import math
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

    fault, real = begin(place, config), loop.train_step

    def step(*arguments: object) -> object:
        meet(fault)
        return real(*arguments)  # type: ignore[arg-type]

    loop.train_step = step  # type: ignore[assignment]
    loop.train_rank(place, config, run_dir, data_dir)


def record_rank(place: Place, config: Config, run_dir: Path, data_dir: Path) -> None:
    """Stand for train_rank, without torch: a record with a step each 20th of a second, and the fault."""
    from shardlab.tracking.record import EventLog

    fault, steps = begin(place, config), config.trainer.steps
    log = EventLog(run_dir / ("events.jsonl" if place.rank == 0 else f"rank-{place.rank}.jsonl"))
    if place.rank == 0:
        log.write("start", total_steps=steps, parameters=9, ranks=place.ranks)
    for step in range(1, steps + 1):
        time.sleep(0.05)
        meet(fault)
        if place.rank == 0:
            log.write("step", step=step, epoch=0, loss=1 / step, grad_norm=0.1, lr=0.5, tokens=10, seconds=0.05)
    if place.rank == 0:
        loss = 0.3 if config.optimizer.lr < 1 else math.nan
        log.write("eval", split="val", step=steps, loss=loss, perplexity=1.3)
        log.write("best", step=steps, loss=loss)
    log.write("rank", rank=place.rank, peak_memory=100, device="cpu")


def begin(place: Place, config: Config) -> str:
    """Count the job; returns the fault that this rank is to meet."""
    if place.rank == 0:
        with Path(COUNT).open("a") as file:
            file.write(f"{config.seed}\n")
    faulty = mood() == "faulty" and place.rank == place.ranks - 1
    return FAULTS.get(config.seed, "") if faulty else ""


def mood() -> str:
    """What the test wants of all ranks: faulty, slow or mended."""
    return os.environ.get("SHARDLAB_TEST_MOOD", "faulty")


def meet(fault: str) -> None:
    """Go wrong, before a step."""
    if mood() == "slow":
        time.sleep(2)
    if fault == "exception":
        raise ValueError("the loss is made of cheese")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        sys.exit(0)
    while fault == "loop":
        pass
