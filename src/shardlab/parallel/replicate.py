"""Data parallel copies: the gradients of the ranks' shares are summed, bucket by bucket, while backward still runs.

A reducer of our own instead of DistributedDataParallel, for three reasons. DDP averages, and re-orders its
buckets after the first step, so that a resumed run adds in another order than an unbroken one. Its hooks don't
fire under schedules that split the backward pass. And its destructor races with its process group's. This one
SUMs, keeps the table's reversed order for good, and reduces whatever no hook has announced when the step ends.

Gradients live in the buckets themselves (`parameter.grad` is a view), so nothing is copied to be sent.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from shardlab.parallel.table import Entry

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Sizes at which a bucket is closed: large enough to amortise a collective's start, the first one small so that it
leaves early. DDP's own choice (Li et al. 2020, section 3.2.3)."""


class GradientSum:
    """Sums the gradients of a step over the ranks of a group.

    A step is: `start(n)`, the backward passes of n micro-batches in any order, `finish()`. A bucket leaves as soon as
    each of its parameters has had its n-th gradient. Every rank of the group must hold the same parameters. With
    group None, one process, nothing is sent.
    """

    def __init__(self, held: list[tuple[Entry, nn.Parameter]], group: ProcessGroup | None, axis: str = "replicate"):
        self._group = group
        self._parameters = [parameter for entry, parameter in held if axis in entry.summed_over]
        self._buckets: list[Tensor] = []
        self._pending: list[int] = []
        self._members: list[int] = []
        self._works: list[Work] = []
        if group is not None:
            self._fill_buckets()

    def _fill_buckets(self) -> None:
        """Cut the parameters, last first (as backward reaches them), into flat buffers that hold their gradients."""
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in reversed(self._parameters):
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= (BUCKET_BYTES if self._buckets else FIRST_BUCKET_BYTES):
                self._close_bucket(bucket)
                bucket, size = [], 0
        if bucket:
            self._close_bucket(bucket)

    def _close_bucket(self, parameters: list[nn.Parameter]) -> None:
        number = len(self._buckets)
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        first = 0
        for parameter in parameters:
            parameter.grad = flat[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))
        self._buckets.append(flat)
        self._members.append(len(parameters))

    def start(self, backwards: int) -> None:
        """Forget the last step's gradients; this step has so many backward passes on this rank."""
        for flat in self._buckets:
            flat.zero_()
        if not self._buckets:
            for parameter in self._parameters:
                parameter.grad = None
        self._pending = [members * backwards for members in self._members]

    def _arrived(self, number: int, _: Tensor) -> None:
        self._pending[number] -= 1
        # In the buckets' order on every rank, or two ranks' collectives would be matched wrongly.
        while len(self._works) < len(self._buckets) and self._pending[len(self._works)] == 0:
            self._send()

    def _send(self) -> None:
        flat = self._buckets[len(self._works)]
        work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        assert work is not None  # async_op
        self._works.append(work)

    def finish(self) -> None:
        """Send what is left and wait: every gradient is the sum over the group when this returns."""
        while len(self._works) < len(self._buckets):
            self._send()
        for work in self._works:
            work.wait()
        self._works.clear()
