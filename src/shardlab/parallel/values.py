"""A parameter's first values, and the parameters that a rank holds.

A value is drawn from (seed, the parameter's canonical name), always on the CPU in fp32 and in the order of the whole,
then cast: so every mesh, device and precision starts from the same numbers. No rank ever needs another parameter for
it, nor more of this one than it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardlab.parallel.part import Part
from shardlab.parallel.table import Constant, Entry, Law, Normal, ParameterTable, Uniform

_SKIPPED = 2**18
"""Values drawn at a time where a rank walks over what others hold: 1 MiB."""


def draw(law: Law, count: int, generator: torch.Generator) -> Tensor:
    """The next `count` values of a law: fp32 [count] on the CPU. Drawing a, then b, gives the same as drawing a + b.

    A normal one is made by Box and Muller's transform of two uniforms a value: torch's own draws in blocks of 16.
    """
    match law:
        case Uniform():
            return torch.empty(count).uniform_(-law.bound, law.bound, generator=generator)
        case Normal():
            radius, angle = torch.rand(count, 2, generator=generator).unbind(1)
            return (-2 * torch.log1p(-radius)).sqrt_() * torch.cos(2 * math.pi * angle) * law.std
        case Constant():
            return torch.full((count,), law.value)


def initial_value(entry: Entry, seed: int, part: Part | None = None) -> Tensor:
    """A parameter's first value, or what a part holds of it: fp32 on the CPU, a function of (seed, name) alone.

    The whole parameter's values are one stream in its row-major order. A rank walks through it and keeps its own
    stretches: no tensor larger than its slice is ever made. Padding is zero.
    """
    digest = hashlib.blake2b(f"{seed}/{entry.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    own = None if part is None else part.span(entry)
    if own is None or part is None or entry.tensor_dim is None:
        return draw(entry.law, entry.elements, generator).view(entry.shape)
    if isinstance(entry.law, Constant):
        value = draw(entry.law, math.prod(part.shape(entry)), generator).view(part.shape(entry))
        value.narrow(entry.tensor_dim, own.valid, own.size - own.valid).zero_()
        return value
    value = torch.zeros(part.shape(entry))
    inner = math.prod(entry.shape[entry.tensor_dim + 1 :])
    before, after = own.first * inner, (entry.shape[entry.tensor_dim] - own.first - own.valid) * inner
    for stretch in value.view(-1, own.size * inner):
        _skip(entry.law, before, generator)
        stretch[: own.valid * inner] = draw(entry.law, own.valid * inner, generator)
        _skip(entry.law, after, generator)
    return value


def _skip(law: Law, count: int, generator: torch.Generator) -> None:
    """Draw `count` values and forget them, a megabyte at a time."""
    for first in range(0, count, _SKIPPED):
        draw(law, min(_SKIPPED, count - first), generator)


def uses(models: list[nn.Module], apart: bool = False) -> Callable[[nn.Parameter], int]:
    """By parameter, how many gradients a micro-batch brings: one from each of this rank's models that hold it.

    apart: two uses in one model, of a tied weight, count as two: the head's gradient is added by hand (see
    weight_gradients.py), and autograd brings the embedding's
    """
    named = (model.named_parameters(remove_duplicate=not apart) for model in models)
    count = Counter(parameter for parameters in named for _, parameter in parameters)
    return lambda parameter: count[parameter]


def held(models: list[nn.Module], table: ParameterTable) -> list[tuple[Entry, nn.Parameter]]:
    """The parameters that this rank's models hold, in the table's order, a tied group once, under its owner's entry.

    Raises ValueError where a model holds a parameter that the table doesn't know.
    """
    by_owner: dict[str, nn.Parameter] = {}
    for model in models:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if unknown := parameters.keys() - table.entries.keys():
            raise ValueError(f"parameters without a table entry: {sorted(unknown)}")
        for name, parameter in parameters.items():
            by_owner.setdefault(table[name].tied_to or name, parameter)
    return [(entry, by_owner[entry.name]) for entry in table.own if entry.name in by_owner]


def materialise(
    models: list[nn.Module],
    table: ParameterTable,
    part: Part,
    seed: int,
    put: Callable[[Entry, Tensor], Tensor],
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Give models that were built on the meta device their first values, one parameter at a time.

    part: what this rank holds of the model, in all of them
    put: keeps a parameter's value (fp32 on the CPU), and returns the tensor that the parameter is to be
    after_each: called for each parameter that is made
    """
    made: dict[str, nn.Parameter] = {}
    for model in models:
        owners = dict(model.named_modules())
        for name in [name for name, _ in model.named_parameters(remove_duplicate=False)]:
            source = table[name].tied_to or name
            if source not in made:
                made[source] = nn.Parameter(put(table[source], initial_value(table[source], seed, part)))
                after_each()
            owner, _, leaf = name.rpartition(".")
            setattr(owners[owner], leaf, made[source])
