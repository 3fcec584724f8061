"""What a rank holds of its model: parameters, gradients and optimizer state, looked at whenever they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.config.schema import Config
from shardlab.data.dataset import open_dataset
from shardlab.parallel.mesh import connect, mesh_of
from shardlab.parallel.shard import Sharded
from shardlab.training.build import Training, build
from shardlab.training.device import meet, prepare_device
from shardlab.training.loop import steps
from shardlab.training.place import Place
from shardlab.training.step import train_step

_kept: list[object] = []
"""Holds what must outlive the process group until the process leaves by os._exit: freed earlier, gloo may hang."""


@dataclass(frozen=True)
class Bytes:
    """Held at one time by a rank, in bytes."""

    parameters: int
    gradients: int
    state: int

    @property
    def all(self) -> int:
        """Of all three kinds."""
        return self.parameters + self.gradients + self.state


@dataclass(frozen=True)
class Measured:
    """elements: of the whole model; between: what is held between two steps; peak: when it was most within one"""

    elements: int
    between: Bytes
    peak: Bytes


def measure(place: Place, config: Config, data_dir: Path) -> Measured:
    """Train two steps as one rank; the second one, which has the optimizer's state, is looked at."""
    device = prepare_device(config.runtime, place)
    meet(place, device, config.runtime.timeout)
    mesh = connect(mesh_of(config.strategy), place.rank, device.type, config.runtime.timeout)
    training = build(config, mesh, device, open_dataset(data_dir, config.dataset))
    _kept.append(training)
    seen: list[Bytes] = []
    for step, _, batch in steps(training, 2, 2):
        if step == 2:
            watch(training, seen)
        train_step(training, batch, step, config.optimizer.lr)
    between = held(training)
    return Measured(training.table.elements, between, max([between, *seen], key=lambda each: each.all))


def watch(training: Training, seen: list[Bytes]) -> None:
    """Look before and after whatever gathers, adds or reduces, and when autograd has a gradient to add."""
    reducer = training.reducer

    def looking(method: Callable[..., Any]) -> Callable[..., Any]:
        def looked_at(*args: Any) -> Any:
            seen.append(held(training))
            result = method(*args)
            seen.append(held(training))
            return result

        return looked_at

    if isinstance(reducer, Sharded):
        for name in ("_reduce", "_take", "_use"):
            setattr(reducer, name, looking(getattr(reducer, name)))
    for _, parameter in training.held:
        parameter.register_hook(lambda gradient: seen.append(held(training, [gradient])))


def held(training: Training, arriving: Iterable[Tensor] = ()) -> Bytes:
    """What is held now. arriving: gradients that are to be added"""
    reducer = training.reducer
    parameters: list[Tensor] = [p for _, p in (*training.held, *reducer.trained)]
    gradients = [*arriving, *(p.grad for p in parameters if isinstance(p, nn.Parameter) and p.grad is not None)]
    if isinstance(reducer, Sharded):
        for unit in reducer._held:
            parameters += [unit.whole, unit.own]
            gradients += [unit.gradient, *([] if unit.summands is None else [unit.summands])]
        gradients += [tensor for _, *tensors, _ in reducer._reducing for tensor in tensors]
    state = [value for of_one in training.optimizer.state.values() for value in of_one.values()]
    return Bytes(in_bytes(parameters), in_bytes(gradients), in_bytes([s for s in state if torch.is_tensor(s)]))


def in_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the tensors' memory, each piece of it once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())
