"""Cutting a step into micro-batches.

The cut is made from the config and the number of rows alone, before anybody decides who computes what. Whatever
must not depend on the mesh (loss weights, dropout masks, data order) refers to a row by its number in the global
batch, so that the cut changes nothing but the order of floating-point sums.

All micro-batches of a step have one shape: parts are as even as possible and padded with copies of a real row
whose targets are ignored, so that padding is well-behaved numerically and weighs nothing.

The cut itself needs no torch: the plan makes the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE = -100
"""A target that weighs nothing (torch's own default for cross-entropy)."""


@dataclass(frozen=True)
class MicroBatch:
    """One unit of work of a step.

    number: its place in the step's cut, 0..G-1; the same under every mesh
    rows: int64 [rows], numbers in the global batch; what dropout masks are keyed by
    inputs: int64 [rows, seq]
    targets: int64 [rows, seq] or [rows]; IGNORE marks padding
    lengths: int64 [rows]; positions from there on are padding
    """

    number: int
    rows: Tensor
    inputs: Tensor
    targets: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on the device."""
        return MicroBatch(
            self.number,
            self.rows.to(device),
            self.inputs.to(device),
            self.targets.to(device),
            self.lengths.to(device),
        )


def parts(rows: int, micro_batch: int | None, micro_batches: int | None, data_ranks: int) -> list[range]:
    """The rows of each micro-batch of a step; an empty range is an all-ignored one.

    rows: of this step's global batch (the last of an epoch may have fewer than the others)
    micro_batch: most rows of one part; micro_batches: number of parts; neither: one part for each data rank

    The number of parts is rounded up to a multiple of data_ranks with all-ignored ones.
    """
    if micro_batches is None:
        micro_batches = -(-rows // micro_batch) if micro_batch else data_ranks
    small, larger = divmod(rows, micro_batches)
    cut, first = [], 0
    for number in range(-(-micro_batches // data_ranks) * data_ranks):
        size = (small + (number < larger)) if number < micro_batches else 0
        cut.append(range(first, first + size))
        first += size
    return cut


def take(number: int, part: range, width: int, inputs: Tensor, targets: Tensor, lengths: Tensor) -> MicroBatch:
    """Micro-batch `number` with the rows of `part`, padded to `width` rows."""
    import torch

    start = part.start if part else 0
    rows = torch.full((width,), start, dtype=torch.int64)
    rows[: len(part)] = torch.arange(part.start, part.stop)
    chosen = targets[rows]
    chosen[len(part) :] = IGNORE
    return MicroBatch(number, rows, inputs[rows], chosen, lengths[rows])


def share(cut: list[range], data_rank: int, data_ranks: int) -> list[int]:
    """Numbers of the micro-batches that a data rank computes: dealt in turn, so that ignored ones spread evenly."""
    return list(range(data_rank, len(cut), data_ranks))
