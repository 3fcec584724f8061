"""Data parallel copies: the gradients of the ranks' shares are summed, bucket by bucket, while backward still runs.

A reducer of our own instead of DistributedDataParallel, for three reasons. DDP averages, and re-orders its
buckets after the first step, so that a resumed run adds in another order than an unbroken one. Its hooks don't
fire under schedules that split the backward pass. And its destructor races with its process group's. This one
SUMs, keeps the table's reversed order for good, and reduces whatever no hook has announced when the step ends.

Gradients live in the buckets themselves (`parameter.grad` is a view), so nothing is copied to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardlab.parallel.axis import Axis, Pending
from shardlab.parallel.buckets import buckets
from shardlab.parallel.table import Entry

Members = list[tuple[Entry, nn.Parameter]]
"""Parameters, or what a rank holds of them, each with its entry of the table."""


class GradientSum:
    """Sums the gradients of a step over the ranks of an axis.

    A step is: `start(n)`, the backward passes of n micro-batches in any order, `finish()`. A bucket leaves as soon as
    each of its parameters has had all its gradients. Every rank of the axis must hold the same parameters. On an axis
    of one rank nothing is sent.

    held: what the models hold, in the table's order; it is also what the optimizer trains
    uses: by parameter, how many gradients a micro-batch brings
    """

    def __init__(self, held: Members, uses: Callable[[nn.Parameter], int], axis: Axis) -> None:
        self.trained = held
        self._axis = axis
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._buckets: list[Tensor] = []
        self._members: list[int] = []
        self._pending: list[int] = []
        self._works: list[Pending] = []
        if axis.group is not None:
            self._fill_buckets([parameter for entry, parameter in held if axis.name in entry.summed_over], uses)

    def _fill_buckets(self, parameters: list[nn.Parameter], uses: Callable[[nn.Parameter], int]) -> None:
        """Cut the parameters, last first (as backward reaches them), into flat buffers that hold their gradients."""
        for bucket in buckets([(p.numel(), p.element_size()) for p in reversed(parameters)]):
            own = [parameters[-1 - number] for number in bucket]
            flat = torch.zeros(sum(p.numel() for p in own), dtype=own[0].dtype, device=own[0].device)
            for parameter, gradient in zip(own, flat.split([p.numel() for p in own]), strict=True):
                parameter.grad = gradient.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self.arrived)
                self._bucket_of[parameter] = len(self._buckets)
            self._buckets.append(flat)
            self._members.append(sum(uses(parameter) for parameter in own))

    def start(self, backwards: int) -> None:
        """Forget the last step's gradients; this step has so many backward passes on this rank."""
        for flat in self._buckets:
            flat.zero_()
        if not self._buckets:
            for _, parameter in self.trained:
                parameter.grad = None
        self._pending = [members * backwards for members in self._members]

    def arrived(self, parameter: nn.Parameter) -> None:
        """A gradient has been added to a parameter's. Called by autograd's hook, or by who adds without it."""
        if not self._buckets:
            return
        self._pending[self._bucket_of[parameter]] -= 1
        # In the buckets' order on every rank, or two ranks' collectives would be matched wrongly.
        while len(self._works) < len(self._buckets) and self._pending[len(self._works)] == 0:
            self._send()

    def _send(self) -> None:
        self._works.append(self._axis.start_sum(self._buckets[len(self._works)]))

    def finish(self) -> None:
        """Send what is left and wait: every gradient is the sum over the axis when this returns."""
        while len(self._works) < len(self._buckets):
            self._send()
        for work in self._works:
            work.wait()
        self._works.clear()

    def run(self, place: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute a place of the model: its parameters are here."""
        return function(x)

    def publish(self) -> None:
        """After an update: every rank has made the whole of it."""

    def gathered(self) -> Iterator[Members]:
        """All that the models hold, whole."""
        yield self.trained
