"""The parameter table: everything that is known of a parameter before it exists.

A model writes its table from the config alone. Building, initialising, reducing, the gradient norm, checkpoints, the
plan and parity read it; nothing else decides a name, a shape or a placement. It needs no torch: `shardlab plan`
answers from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardlab.config.schema import AXES
from shardlab.parallel.mesh import DATA_AXES


@dataclass(frozen=True)
class Uniform:
    """U(-bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


Law = Uniform | Normal | Constant


@dataclass(frozen=True)
class Entry:
    """One parameter.

    name: canonical; no wrapper or stage number ever shows in it
    shape: of the whole parameter, whatever a rank holds of it
    law: of its first value
    layer: where it stands along the pipeline: -1 before the first layer, n_layers after the last
    tensor_dim: the dim that the tensor axis cuts; None: every rank of that axis holds it whole
    tied_to: the entry whose values this one shares, if any
    summed_over: the axes over which its gradient must be summed
    """

    name: str
    shape: tuple[int, ...]
    law: Law
    layer: int
    tensor_dim: int | None = None
    tied_to: str | None = None
    summed_over: tuple[str, ...] = DATA_AXES

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterTable:
    """The parameters of a model, in forward order, by canonical name."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Append an entry; a second one of the same name, or an unknown axis, is a bug."""
        if entry.name in self.entries or not set(entry.summed_over) <= set(AXES):
            raise ValueError(f"bad table entry {entry.name}")
        self.entries[entry.name] = entry

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    @property
    def own(self) -> list[Entry]:
        """The entries that hold values of their own: a tied group counts once."""
        return [entry for entry in self if entry.tied_to is None]

    @property
    def elements(self) -> int:
        """Number of trained elements of the whole model."""
        return sum(entry.elements for entry in self.own)
