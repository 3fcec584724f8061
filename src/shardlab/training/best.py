"""The best model by validation loss: a copy in the run folder, never a reference to the live one.

One safetensors file under canonical names and whole shapes, whatever the mesh. Nothing is gathered for it: where
each tensor lies in the file follows from the table, so each rank writes its own part into its place, and reads back
its own part alone.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from shardlab.parallel.part import Part
from shardlab.parallel.table import Entry
from shardlab.training.build import Training
from shardlab.training.pulse import beat

_NAMES = {torch.float32: "F32", torch.float64: "F64"}
"""What safetensors calls a dtype."""

_WRITTEN = 2**20
"""Elements written at a time."""


def best_path(run_dir: Path) -> Path:
    """Where a run keeps its best model."""
    return run_dir / "checkpoints" / "best.safetensors"


def save_best(training: Training, run_dir: Path) -> None:
    """Write the live parameters, whole or not at all. All ranks of the mesh must call it.

    Of ranks that hold the same, the first along each axis writes.
    """
    path = best_path(run_dir)
    unfinished = path.with_suffix(".unfinished")
    dtype = training.held[0][1].dtype
    starts, header = layout(training, dtype)
    place = training.mesh.place
    try:
        if training.mesh.rank == 0:
            path.parent.mkdir(exist_ok=True)
            with unfinished.open("wb") as file:
                file.write(header)
                os.posix_fallocate(file.fileno(), 0, starts[""])  # a full disk shows here, not as holes
        training.mesh.wait()
        writes = place["replicate"] == place["shard"] == 0
        with unfinished.open("r+b") if writes else nullcontext() as file:
            for entry, parameter in (member for group in training.reducer.gathered() for member in group):
                first = entry.layer in training.part.layers and (entry.tensor_dim is not None or place["tensor"] == 0)
                if file is not None and first:
                    write_part(file, starts[entry.name], entry, training.part, parameter.detach())
                beat()
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        training.mesh.wait()
        if training.mesh.rank == 0:
            os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def layout(training: Training, dtype: torch.dtype) -> tuple[dict[str, int], bytes]:
    """Where each tensor's bytes start in the file (the file's end under ""), and the bytes before the first.

    Source: the format's own description, github.com/huggingface/safetensors: the header's length as eight bytes,
    the header in JSON, then the tensors in row-major order. Blanks pad the header, so that tensors are aligned.
    """
    starts, header, first = {}, {}, 0
    for entry in training.table.own:
        starts[entry.name], first = first, first + entry.elements * dtype.itemsize
        offsets = [starts[entry.name], first]
        header[entry.name] = {"dtype": _NAMES[dtype], "shape": list(entry.shape), "data_offsets": offsets}
    starts[""] = first
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    bytes_before = len(text).to_bytes(8, "little") + text
    return {name: len(bytes_before) + start for name, start in starts.items()}, bytes_before


def write_part(file: BinaryIO, start: int, entry: Entry, part: Part, held: Tensor) -> None:
    """Write the valid part of a parameter, as `part` holds it, into the whole one that begins at byte `start`.

    A slice along a dim is one stretch of bytes for each index of the dims before it.
    """
    own, dim = held[part.valid(entry)].cpu(), entry.tensor_dim or 0
    stride = math.prod(entry.shape[dim:]) * own.itemsize
    first = part.index(entry)[dim].start * math.prod(entry.shape[dim + 1 :]) * own.itemsize
    count = math.prod(entry.shape[:dim])
    for number, stretch in enumerate(own.reshape(count, own.numel() // count)):
        file.seek(start + number * stride + first)
        for some in stretch.split(_WRITTEN):
            file.write(some.clone().numpy().data)  # a clone: memory that numpy has seen can't be given back


@torch.no_grad()
def load_best(training: Training, run_dir: Path) -> None:
    """Put the saved values into the live parameters; every rank reads what it holds."""
    training.mesh.wait()
    with safe_open(best_path(run_dir), framework="pt", device=str(training.device)) as saved:
        for entry, parameter in (member for group in training.reducer.gathered() for member in group):
            own = saved.get_slice(entry.name)[training.part.index(entry)]
            parameter[training.part.valid(entry)].copy_(own)
            beat()
