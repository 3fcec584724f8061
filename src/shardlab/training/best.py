"""The best model by validation loss: a copy in the run folder, never a reference to the live one."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardlab.training.build import Training


def best_path(run_dir: Path) -> Path:
    """Where a run keeps its best model."""
    return run_dir / "checkpoints" / "best.safetensors"


def save_best(training: Training, run_dir: Path) -> None:
    """Write the live parameters, whole or not at all. Only rank 0 writes: it holds them all."""
    if training.mesh.rank != 0:
        return
    path = best_path(run_dir)
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file({entry.name: parameter.detach().contiguous() for entry, parameter in training.held}, unfinished)
    os.replace(unfinished, path)


@torch.no_grad()
def load_best(training: Training, run_dir: Path) -> None:
    """Put the saved values into the live parameters; every rank reads what it holds."""
    with safe_open(best_path(run_dir), framework="pt", device=str(training.device)) as saved:
        for entry, parameter in training.held:
            parameter.copy_(saved.get_tensor(entry.name))
