"""Stand-ins for the parts of a run that these tests don't need: the data, and the training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlab.config.compose import Composed, compose
from shardlab.config.schema import Task
from shardlab.data.prepared import Meta
from shardlab.launch.job import Job
from shardlab.sweeps.books import Sweep, about_sweep
from shardlab.sweeps.rows import Row

FINGERPRINT = "0123456789abcdef"


def stand_in(module: Any) -> None:
    """Have shardlab.launch.run start ranks that write a small record and meet a fault, on data that are there."""
    data = Path("data").absolute()
    data.mkdir(exist_ok=True)
    Meta("pydoc", Task.language_model, 5, 0, {"train": 9999}, fingerprint=FINGERPRINT).write(data)
    module.TRAIN_RANK = "launch_faults:record"
    module.prepare = lambda config, global_batch: data


def sweep_of(folder: str, command: Sequence[str] = ("shardlab",), space: Sequence[str] = ()) -> Sweep:
    """A sweep's books, called after its folder."""
    about = about_sweep(command, space)
    return Sweep(Path(folder), {**about, "name": f"sweep {Path(folder).name}"}, ["val/loss"])


def ended(sweep: Sweep, number: int, status: str = "finished", *objective: float) -> None:
    """Keep a row."""
    sweep.rows.write(Row(number, "", "", status, objective=list(objective), folder=str(number)))


def job_of(sweep: Sweep, number: int, what: str = "") -> Job:
    """A job of the sweep, as SweepJobs makes it."""
    return Job(number, what, sweep.folder, sweep.begin)


def composed(fault: str = "none", *overrides: str) -> Composed:
    """A run in the folder `run` on two ranks, whose last meets a fault."""
    made = compose(["strategy=ddp", "run_dir=run", "tracking=none", *overrides])
    return replace(made, config=replace(made.config, model=replace(made.config.model, name=fault)))
