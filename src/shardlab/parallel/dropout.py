"""Dropout whose masks belong to the computation, not to the process.

Whether an element is dropped is a stateless integer hash of (seed, step, site in the model, row number in the
global batch, position, feature), or (.., row, head, query, key) for attention probabilities. There is no
generator and no state: a rank computes the mask of just the slice that it holds, and any cut of the rows, any
padding and any mesh give the same mask.

The mixer is lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018: xorshift-multiply finalizer of the
murmur type with the lowest bias found), applied once per index: h = mix(h ^ mix(index)). It runs in int32, which
every torch backend has (uint32 has no shift or compare); torch's int32 shift is arithmetic, hence the masks after
it. A site's key is 64 bits wide, one word mixed in at the rows and one at the next index: with one 32-bit word
the keys of a long run collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32


def mix(x: Tensor) -> Tensor:
    """lowbias32 of each element. x: int32; returns a new int32 tensor of the same shape."""
    shifted = (x >> 16).bitwise_and_(0xFFFF)
    x = shifted.bitwise_xor_(x).mul_(_FIRST)
    shifted = (x >> 15).bitwise_and_(0x1FFFF)
    x = shifted.bitwise_xor_(x).mul_(_SECOND)
    shifted = (x >> 16).bitwise_and_(0xFFFF)
    return shifted.bitwise_xor_(x)


def step_keys(seed: int, step: int, sites: list[str], device: torch.device) -> Tensor:
    """The key of each site at a step: int32 [sites, 2]. Made on the CPU, so that it is the same everywhere."""
    words = b"".join(hashlib.blake2b(f"{seed}/{step}/{site}".encode(), digest_size=8).digest() for site in sites)
    keys = torch.frombuffer(bytearray(words), dtype=torch.int32) if words else torch.empty(0, dtype=torch.int32)
    return keys.view(-1, 2).to(device)


def premix(indices: Tensor) -> Tensor:
    """What `keep` takes of a vector of indices: int32 of the same length."""
    return mix(indices.to(torch.int32))


@lru_cache(maxsize=64)
def _counted(first: int, size: int, device: torch.device) -> Tensor:
    """The premixed indices first, first + 1, ...: the same at every site, micro-batch and step."""
    return premix(torch.arange(first, first + size, device=device))


def keep(key: Tensor, premixed: list[Tensor], p: float) -> Tensor:
    """Which elements stay: bool of shape [len(i) for i in premixed].

    key: int32 [2]
    premixed: at least two vectors by `premix`; the first numbers the rows
    p: probability of being dropped, 0..1
    """
    rows, second, *others = premixed
    h = mix(rows ^ key[0])
    for index in (second ^ key[1], *others):
        h = mix(h.unsqueeze(-1) ^ index)
    return h >= round(p * 2**32) - 2**31


def kept(key: Tensor, rows: Tensor, firsts: Sequence[int], sizes: Sequence[int], p: float) -> Tensor:
    """Which elements of a slice stay: bool of shape [len(rows), *sizes].

    rows: as `premix` gives it
    firsts: where the slice begins along each further dim; sizes: its size there

    Under torch.compile it is called as it is (training/compiled.py): a C++ compiler may take it that an int32 never
    overflows, as this hash must. With g++ a seventh of a mask came out otherwise.
    """
    counted = [_counted(first, size, rows.device) for first, size in zip(firsts, sizes, strict=True)]
    return keep(key, [rows, *counted], p)


@dataclass(frozen=True)
class Masks:
    """The dropout of one micro-batch in one step.

    keys: int32 [sites, 2] by `step_keys`; a site is named by its index there
    rows: int64 [rows], numbers in the global batch
    p: probability of an element being dropped, 0..1
    """

    keys: Tensor
    rows: Tensor
    p: float
    _rows: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", premix(self.rows))

    def drop(self, x: Tensor, site: int, dim: int = 1, first: int = 0) -> Tensor:
        """Zero a share p of x and scale the rest by 1/(1-p).

        x: [rows, positions, features], or attention probabilities [rows, heads, queries, keys]
        dim, first: x is a slice of the whole along that dim, from that index on
        """
        firsts = [first if dim == place else 0 for place in range(1, x.dim())]
        stays = torch.ops.shardlab.kept if torch.compiler.is_compiling() else kept
        return x * stays(self.keys[site], self._rows, firsts, x.shape[1:], self.p).to(x.dtype).mul_(1 / (1 - self.p))
