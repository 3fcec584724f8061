"""A config's training as one of its ranks has it, for tests that look inside a rank."""

from __future__ import annotations

from pathlib import Path

import torch

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.dataset import Batch, open_dataset
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.parallel.mesh import connect, mesh_of
from shardlab.training.build import Training, build
from shardlab.training.device import meet
from shardlab.training.loop import steps
from shardlab.training.place import Place

CPU = torch.device("cpu")
_kept: list[object] = []
"""Holds what must outlive the process group; see training/loop.py."""


def in_ranks(function: str, overrides: list[str], folder: Path, *further: object) -> list:
    """Call "module:function"(place, config, data_dir, *further) in the ranks of a config; what each gave, by rank."""
    config = check(compose([*overrides, "runtime.threads=1"]).config)
    return run_ranks(function, (config, prepare(config.dataset), *further), config.ranks, log_dir=folder)


def begin(place: Place, config: Config, data_dir: Path) -> Training:
    """Meet the other ranks, and build this one's part."""
    torch.set_num_threads(1)
    meet(place, CPU, 60.0)
    mesh = connect(mesh_of(config.strategy), place.rank, "cpu", 60.0, config.strategy.reduce)
    training = build(config, mesh, CPU, open_dataset(data_dir, config.dataset))
    _kept.append(training)
    return training


def batches(training: Training, count: int) -> list[tuple[int, Batch]]:
    """The first steps' numbers, from 1, and their rows."""
    return [(step, batch) for step, _, batch in steps(training, count, count)]


def whole_weights(training: Training) -> dict[str, torch.Tensor]:
    """Copies of what this rank's models hold, each whole, by canonical name."""
    groups = training.reducer.gathered()
    return {entry.name: parameter.detach().clone() for group in groups for entry, parameter in group}
