"""One axis of the mesh as a rank sees it: how many ranks it shares it with, and what has travelled over it.

Every collective of a run goes through here, so that bytes are counted where they are asked for. Counted is what a rank
sends if the collective is a ring (Patarasuk and Yuan 2009: the least that any algorithm can do): 2(n-1)/n of the
tensor for an all-reduce, (n-1)/n of the whole for a reduce-scatter or an all-gather, all of it for a send. The plan
counts by the same functions before there is any rank, so this module imports torch only to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, ReduceOp


class Pending(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done; on a GPU, when what the stream does next will find it done."""


class Done:
    """Nothing is under way."""

    def wait(self) -> None:
        """Return at once."""


def part_bytes(elements: int, itemsize: int, ranks: int) -> int:
    """Sent by a rank in a reduce-scatter or an all-gather of a tensor of so many elements in all."""
    return (ranks - 1) * -(-elements // ranks) * itemsize


def all_reduce_bytes(elements: int, itemsize: int, ranks: int) -> int:
    """Sent by a rank in an all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * part_bytes(elements, itemsize, ranks)


@dataclass(frozen=True)
class Axis:
    """A rank's place on an axis.

    name: of the axis
    rank, ranks: its number there, and how many there are
    group: the ranks that differ from this one along this axis alone; None where it is alone, and nothing is sent
    ring: take this project's own ring (ring.py) where a large tensor is reduced, instead of the backend's algorithm
    sent: bytes by kind (all_reduce, reduce_scatter, all_gather, send), counted at the calls
    """

    name: str
    rank: int = 0
    ranks: int = 1
    group: ProcessGroup | None = None
    ring: bool = False
    sent: Counter[str] = field(default_factory=Counter, compare=False)

    def all_reduce(self, x: Tensor, op: ReduceOp.RedOpType | None = None) -> Tensor:
        """x combined over the axis, in place (op: SUM if not given); returns it."""
        if self.group is not None:
            import torch.distributed as dist

            self._count_all_reduce(x)
            dist.all_reduce(x, op=dist.ReduceOp.SUM if op is None else op, group=self.group)
        return x

    def start_sum(self, x: Tensor) -> Pending:
        """Begin to sum x over the axis, in place."""
        if self.group is None:
            return Done()
        import torch.distributed as dist

        if self.ring:
            from shardlab.parallel.ring import ring_all_reduce

            ring_all_reduce(x, self)
            return Done()
        self._count_all_reduce(x)
        work: Pending | None = dist.all_reduce(x, group=self.group, async_op=True)
        return work or Done()

    def start_reduce_scatter(self, own: Tensor, x: Tensor) -> Pending:
        """Begin to put this rank's part of the sum of x over the axis into own. x: [ranks * n]; own: [n]"""
        import torch.distributed as dist

        if self.ring:
            from shardlab.parallel.ring import ring_reduce_scatter

            ring_reduce_scatter(own, x, self)
            return Done()
        self.sent["reduce_scatter"] += part_bytes(x.numel(), x.element_size(), self.ranks)
        work: Pending | None = dist.reduce_scatter_single(own, x, group=self.group, async_op=True)
        return work or Done()

    def start_all_gather(self, x: Tensor, own: Tensor) -> Pending:
        """Begin to put all ranks' own one behind the other into x. x: [ranks * n]; own: [n], may be x's own part"""
        import torch.distributed as dist

        if self.ring:
            from shardlab.parallel.ring import ring_all_gather

            ring_all_gather(x, own, self)
            return Done()
        self.sent["all_gather"] += part_bytes(x.numel(), x.element_size(), self.ranks)
        work: Pending | None = dist.all_gather_single(x, own, group=self.group, async_op=True)
        return work or Done()

    def exchange(
        self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]], kind: str = "send"
    ) -> list[Pending]:
        """Begin to send contiguous tensors to ranks of this axis, and to receive from them, as one batch.

        A batch can't deadlock, whichever side posts which first. Between two ranks, tensors arrive in the order in
        which they were sent; the tensors must live until they have left. kind: what it is counted as.

        Returns what is under way for each, sends first.
        """
        import torch.distributed as dist

        parts = []
        for x, peer in sends:
            self.sent[kind] += x.numel() * x.element_size()
            parts.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=peer))
        for x, peer in receives:
            parts.append(dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer))
        works: list[Pending] = list(dist.batch_isend_irecv(parts)) if parts else []
        return works if len(works) == len(parts) else works * len(parts)  # nccl makes one of all

    def _count_all_reduce(self, x: Tensor) -> None:
        self.sent["all_reduce"] += all_reduce_bytes(x.numel(), x.element_size(), self.ranks)
