"""What one rank holds of the model: a run of layers, and a share of each matrix that the tensor axis cuts.

The table says where a parameter may be cut; a part says what is left of it here. Building, first values, the
gradient norm and the saved model all ask the part, so that nothing else does arithmetic with ranks.

A dim that does not divide by the number of ranks (only a vocabulary may) is cut as if it were padded up to a
multiple: every rank holds the same shape, and the last one's padding rows are zeros that never count.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardlab.parallel.axis import Axis

if TYPE_CHECKING:
    from shardlab.parallel.table import Entry


@dataclass(frozen=True)
class Span:
    """Where a rank's slice lies along the dim that is cut.

    first: index of its first element in the whole dim
    size: elements held, padding included; valid: those that are in the whole dim
    """

    first: int
    size: int
    valid: int


def span(whole: int, axis: Axis) -> Span:
    """This rank's slice of a dim of `whole` elements."""
    size = -(-whole // axis.ranks)
    first = axis.rank * size
    return Span(first, size, max(0, min(size, whole - first)))


@dataclass(frozen=True)
class Part:
    """layers: places along the pipeline that are here, -1 (embedding) to n_layers (final norm and head).

    axis: the tensor axis, or as much of it as its rank and size
    sequence_parallel: between matrices that the axis cuts, this rank holds a slice of each sequence (sequence.py)
    """

    layers: Collection[int]
    axis: Axis = field(default_factory=lambda: Axis("tensor"))
    sequence_parallel: bool = False

    def positions(self, seq: int) -> Span:
        """What is here of sequences between the matrices: all positions, or a slice, with the padding behind them."""
        return span(seq, self.axis) if self.sequence_parallel else Span(0, seq, seq)

    def span(self, entry: Entry) -> Span | None:
        """The slice of its tensor dim that is here; None where the parameter is not cut."""
        if entry.tensor_dim is None or self.axis.ranks == 1:
            return None
        return span(entry.shape[entry.tensor_dim], self.axis)

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape held here, padding included."""
        part = self.span(entry)
        if part is None or entry.tensor_dim is None:
            return entry.shape
        return (*entry.shape[: entry.tensor_dim], part.size, *entry.shape[entry.tensor_dim + 1 :])

    def index(self, entry: Entry) -> tuple[slice, ...]:
        """Where the valid slice lies in the whole parameter: `whole[index]` is what this rank holds of it."""
        part = self.span(entry)
        if part is None or entry.tensor_dim is None:
            return tuple(slice(0, size) for size in entry.shape)
        return tuple(
            slice(part.first, part.first + part.valid) if dim == entry.tensor_dim else slice(0, size)
            for dim, size in enumerate(entry.shape)
        )

    def valid(self, entry: Entry) -> tuple[slice, ...]:
        """Where the valid slice lies in what is held: all of it but the padding."""
        return tuple(slice(0, index.stop - index.start) for index in self.index(entry))
