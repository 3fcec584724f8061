"""Training a config with real ranks for the parity tests, and the design's measure of 'the same'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shardlab.analysis.same import BOUNDS, compare, outcome_of
from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.tracking.record import read_events
from shardlab.training.best import best_path
from shardlab.training.loop import train_rank
from shardlab.training.place import Place


@dataclass(frozen=True)
class Trained:
    """What a run left behind. events: of rank 0, without times; weights: of the best model, by canonical name."""

    events: list[dict]
    weights: dict[str, Tensor]

    def column(self, key: str) -> list[float]:
        """One value of every step."""
        return [event[key] for event in self.events if event["event"] == "step"]


TIMES = ("seconds", "time", "pid", "peak_memory")


def train(folder: Path, overrides: list[str], fault: str | None = None) -> Trained:
    """Train in fresh ranks, with a fault of faults.py planted in every rank if one is named."""
    config = checked(overrides)
    folder.mkdir(parents=True)
    arguments = (config, folder, prepare(config.dataset))
    if fault is None:
        run_ranks(train_rank, arguments, config.ranks, log_dir=folder)
    else:
        from faults import train_with_fault

        run_ranks(train_with_fault, (fault, *arguments), config.ranks, log_dir=folder)
    return read(folder)


def checked(overrides: list[str]) -> Config:
    """The config, with the settings that every run of the tests has."""
    return check(compose(["trainer.test=false", *overrides, "runtime.threads=1"]).config)


def train_together(folder: Path, trainings: dict[str, list[str]]) -> dict[str, Trained]:
    """Train several configs of one rank each, one after the other in one process, which is quicker."""
    configs = {name: checked([*overrides, "strategy=single"]) for name, overrides in trainings.items()}
    for name in configs:
        (folder / name).mkdir(parents=True)
    runs = [(config, folder / name, prepare(config.dataset)) for name, config in configs.items()]
    run_ranks("trained:train_each", (runs,), 1, log_dir=folder)
    return {name: read(folder / name) for name in configs}


def train_each(place: Place, runs: list[tuple[Config, Path, Path]]) -> None:
    """Train as one rank, run after run."""
    for run in runs:
        train_rank(place, *run)


def read(folder: Path) -> Trained:
    """What a run has left in its folder."""
    events = [
        {key: value for key, value in event.items() if key not in TIMES}
        for event in read_events(folder / "events.jsonl")
    ]
    return Trained(events, load_file(best_path(folder)))


def difference(one: Trained, other: Trained) -> float:
    """The largest relative difference between two runs: losses, norms, evaluations, and every final tensor.

    The best models must be those after the last step. See analysis/same.py.
    """
    for run in (one, other):
        steps = len(run.column("loss"))
        assert [event["step"] for event in run.events if event["event"] == "best"][-1] == steps, "not the last model"
    outcomes = [outcome_of(run.events, {n: w.numpy() for n, w in run.weights.items()}) for run in (one, other)]
    return max(apart.largest for apart in compare(*outcomes, BOUNDS["fp64"]))


def identical(one: Trained, other: Trained) -> bool:
    """Bit for bit: record and weights."""
    same = one.weights.keys() == other.weights.keys() and one.events == other.events
    return same and all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


def evaluation(record: Trained) -> list[dict]:
    """The numbers of each evaluation."""
    return [
        {key: value for key, value in event.items() if not isinstance(value, str)}
        for event in record.events
        if event["event"] == "eval"
    ]


def same_bits(one: Trained, other: Trained) -> bool:
    """Bit for bit: losses, norms, evaluations and weights; the mesh may differ."""
    columns = all(one.column(key) == other.column(key) for key in ("loss", "grad_norm"))
    same = columns and evaluation(one) == evaluation(other) and one.weights.keys() == other.weights.keys()
    return same and all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
