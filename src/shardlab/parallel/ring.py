"""The ring all-reduce, written out: a reduce-scatter, then an all-gather, and a rank talks to its neighbours only.

The tensor is cut into as many chunks as there are ranks. In each of n-1 turns every rank sends a chunk to the right
and gets another from the left. In the first half it adds what comes to its own chunk and sends the sum on, so that
after n-1 turns each rank has one chunk of the whole sum; in the second half those chunks go once round. A rank sends
2(n-1) chunks, 2(n-1)/n of the tensor, however many ranks there are: the least that any algorithm can do.

Chunk c is summed in the order c+1, c+2, ..., c, on one rank, and then copied: all ranks get the same bits.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from shardlab.parallel.axis import Axis


def ring_all_reduce(x: Tensor, axis: Axis) -> None:
    """Sum x over the axis, in place. x: any contiguous tensor"""
    flat = x.view(-1)
    padded = F.pad(flat, (0, -len(flat) % axis.ranks))  # a copy, which the turns may overwrite
    chunks = padded.view(axis.ranks, -1)
    _reduce_scatter(chunks, axis, "all_reduce")
    _all_gather(chunks, axis, "all_reduce")
    flat.copy_(padded[: len(flat)])


def ring_reduce_scatter(own: Tensor, x: Tensor, axis: Axis) -> None:
    """Put this rank's chunk of the sum of x over the axis into own. x: [ranks * n], which is overwritten; own: [n]"""
    chunks = x.view(axis.ranks, -1)
    _reduce_scatter(chunks, axis, "reduce_scatter")
    own.copy_(chunks[axis.rank])


def ring_all_gather(x: Tensor, own: Tensor, axis: Axis) -> None:
    """Put all ranks' own one behind the other into x. x: [ranks * n]; own: [n], may be x's own part"""
    chunks = x.view(axis.ranks, -1)
    chunks[axis.rank].copy_(own)
    _all_gather(chunks, axis, "all_gather")


def _reduce_scatter(chunks: Tensor, axis: Axis, kind: str) -> None:
    """Row r of chunks becomes, on rank r, the sum of all ranks' rows r; the other rows are left half summed."""
    received = torch.empty_like(chunks[0])
    for turn in range(axis.ranks - 1):
        _turn(chunks[(axis.rank - turn - 1) % axis.ranks], received, axis, kind)
        chunks[(axis.rank - turn - 2) % axis.ranks] += received


def _all_gather(chunks: Tensor, axis: Axis, kind: str) -> None:
    """Row r of chunks becomes, on every rank, rank r's row r."""
    for turn in range(axis.ranks - 1):
        _turn(chunks[(axis.rank - turn) % axis.ranks], chunks[(axis.rank - turn - 1) % axis.ranks], axis, kind)


def _turn(sent: Tensor, received: Tensor, axis: Axis, kind: str) -> None:
    """Send one chunk to the right while another comes from the left. kind: what they are counted as"""
    right, left = (axis.rank + 1) % axis.ranks, (axis.rank - 1) % axis.ranks
    for work in axis.exchange([(sent, right)], [(received, left)], kind):
        work.wait()
