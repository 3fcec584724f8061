"""The parameter table: everything that is known of a parameter before it exists.

A model writes its table from the config alone. Building, initialising, reducing, the gradient norm, checkpoints
and parity read it; nothing else decides a name, a shape or a placement.

A parameter's first value is drawn from (seed, its canonical name), always on the CPU in fp32 and in the order of the
whole, then cast: so every mesh, device and precision starts from the same numbers. No rank ever needs another
parameter for it, nor more of this one than it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardlab.config.schema import AXES
from shardlab.parallel.mesh import DATA_AXES
from shardlab.parallel.part import Part

_SKIPPED = 2**18
"""Values drawn at a time where a rank walks over what others hold: 1 MiB."""


@dataclass(frozen=True)
class Uniform:
    """U(-bound, bound)."""

    bound: float

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """The next `count` values: fp32 [count] on the CPU. Drawing a, then b, gives the same as drawing a + b."""
        return torch.empty(count).uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """As Uniform's: by Box and Muller's transform of two uniforms a value (torch's own draws in blocks of 16)."""
        radius, angle = torch.rand(count, 2, generator=generator).unbind(1)
        return (-2 * torch.log1p(-radius)).sqrt_() * torch.cos(2 * math.pi * angle) * self.std


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """As Uniform's."""
        return torch.full((count,), self.value)


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


def initial_value(entry: Entry, seed: int, part: Part | None = None) -> Tensor:
    """A parameter's first value, or what a part holds of it: fp32 on the CPU, a function of (seed, name) alone.

    The whole parameter's values are one stream in its row-major order. A rank walks through it and keeps its own
    stretches: no tensor larger than its slice is ever made. Padding is zero.
    """
    digest = hashlib.blake2b(f"{seed}/{entry.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    own = None if part is None else part.span(entry)
    if own is None or part is None or entry.tensor_dim is None:
        return entry.law.draw(entry.elements, generator).view(entry.shape)
    if isinstance(entry.law, Constant):
        value = entry.law.draw(math.prod(part.shape(entry)), generator).view(part.shape(entry))
        value.narrow(entry.tensor_dim, own.valid, own.size - own.valid).zero_()
        return value
    value = torch.zeros(part.shape(entry))
    inner = math.prod(entry.shape[entry.tensor_dim + 1 :])
    before, after = own.first * inner, (entry.shape[entry.tensor_dim] - own.first - own.valid) * inner
    for stretch in value.view(-1, own.size * inner):
        _skip(entry.law, before, generator)
        stretch[: own.valid * inner] = entry.law.draw(own.valid * inner, generator)
        _skip(entry.law, after, generator)
    return value


def _skip(law: Law, count: int, generator: torch.Generator) -> None:
    """Draw `count` values and forget them, a megabyte at a time."""
    for first in range(0, count, _SKIPPED):
        law.draw(min(_SKIPPED, count - first), generator)


def held(model: nn.Module, table: ParameterTable) -> list[tuple[Entry, nn.Parameter]]:
    """The parameters that this rank's model holds, in the table's order, a tied group once, under its owner's entry.

    Raises ValueError where the model holds a parameter that the table doesn't know.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if unknown := parameters.keys() - table.entries.keys():
        raise ValueError(f"parameters without a table entry: {sorted(unknown)}")
    by_owner: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        by_owner.setdefault(table[name].tied_to or name, parameter)
    return [(entry, by_owner[entry.name]) for entry in table.own if entry.name in by_owner]


def materialise(
    model: nn.Module,
    table: ParameterTable,
    part: Part,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Give a part of a model that was built on the meta device its first values, one parameter at a time.

    after_each: called for each parameter that is made
    """
    owners = dict(model.named_modules())
    made: dict[str, nn.Parameter] = {}
    for name in [name for name, _ in model.named_parameters(remove_duplicate=False)]:
        source = table[name].tied_to or name
        if source not in made:
            value = initial_value(table[source], seed, part)
            made[source] = nn.Parameter(value.to(device=device, dtype=dtype))
            after_each()
        owner, _, leaf = name.rpartition(".")
        setattr(owners[owner], leaf, made[source])
