"""The shard axis: data parallel ranks that don't all keep the same (ZeRO, levels 1 to 3).

Ranks train different rows, as on the replicate axis, but of each unit (units.py) a rank owns one piece, and updates
that piece alone:

1. of the optimizer's state it keeps what its pieces need. Gradients are summed whole, and after the update the new
   parameters are gathered;
2. of the summed gradients too: after each micro-batch a unit's gradients are reduce-scattered, added to the rank's
   piece, and their buffer is freed;
3. of the parameters too: a unit is gathered when its place is computed, forward and backward, and freed when the next
   one has its turn. The next one in that direction is gathered meanwhile.

Not torch's fully_shard: under schedules that split the backward pass its hooks don't fire, and it trains on wrong
gradients; and levels 1 and 2 are not its business. Here all levels share one layout, take what no hook announces, and
add in one order for good. tests/parity/test_shard.py holds fully_shard against level 3.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from shardlab.config.schema import ShardLevel
from shardlab.parallel.axis import Axis, Pending
from shardlab.parallel.part import Part
from shardlab.parallel.replicate import Members
from shardlab.parallel.table import Entry
from shardlab.parallel.units import Unit


@dataclass
class _Held:
    """A unit as this rank holds it.

    whole: [unit.size], without memory between uses under level 3; the model's parameters are views of it
    own: this rank's piece [unit.owned]: a view of whole, or under level 3 a tensor of its own
    gradient: of own, once it is reduced
    summands: [unit.size], the gradients of this rank's rows until they are reduced; under level 1 for good
    members: the model's parameters, each with its entry
    expected: how many gradients come from one micro-batch; arrived: how many have, since the last reduction
    """

    unit: Unit
    whole: Tensor
    own: Tensor
    gradient: Tensor
    summands: Tensor | None
    members: Members = field(default_factory=list)
    expected: int = 0
    arrived: int = 0
    filled: int = 0
    here: bool = True
    gathering: Pending | None = None

    def segment(self, entry: Entry, buffer: Tensor, part: Part) -> Tensor:
        """What of a buffer [unit.size] is an entry's, in the shape that a part holds."""
        start = self.unit.starts[self.unit.entries.index(entry)]
        return buffer[start : start + math.prod(part.shape(entry))].view(part.shape(entry))


class Sharded:
    """What a rank keeps of its parameters, gradients and optimizer state.

    First `put` each parameter's value, then `attach` the parameters that were made of what it returned. A step is as
    GradientSum's: `start(n)`, the backward passes of n micro-batches in any order, `finish()`; after the update
    `publish()`.

    trained: the rank's pieces, what the optimizer updates: 1-D parameters, each with the entry that it is a piece of
    """

    def __init__(
        self,
        units: list[Unit],
        part: Part,
        level: ShardLevel,
        shard: Axis,
        replicate: Axis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.trained: Members = []
        self._part, self._shard, self._replicate = part, shard, replicate
        self._cuts_parameters = level is ShardLevel.parameters
        self._cuts_gradients = level is not ShardLevel.optimizer
        self._zeros = partial(torch.zeros, dtype=dtype, device=device)
        self._held = [self._hold(unit) for unit in units]
        self._of_parameter: dict[nn.Parameter, tuple[Entry, _Held]] = {}
        self._places = {place for unit in units for place in unit.places}
        self._reducing: list[tuple[Pending, Tensor, Tensor, _Held]] = []
        self._backwards = 0

    def _hold(self, unit: Unit) -> _Held:
        mine = slice(self._shard.rank * unit.owned, (self._shard.rank + 1) * unit.owned)
        whole = self._zeros(unit.size)
        summands = None if self._cuts_gradients else self._zeros(unit.size)
        held = _Held(
            unit,
            whole,
            own=self._zeros(unit.owned) if self._cuts_parameters else whole[mine],
            gradient=self._zeros(unit.owned) if summands is None else summands[mine],
            summands=summands,
        )
        if self._cuts_parameters:
            _free(held)
        return held

    def put(self, entry: Entry, value: Tensor) -> Tensor:
        """Keep a parameter's value; returns the tensor that the model's parameter is to be made of.

        value: as the part holds it
        """
        held = next(held for held in self._held if entry in held.unit.entries)
        if not held.here:
            _make_room(held)
            held.whole.data.zero_()
        place = held.segment(entry, held.whole, self._part)
        place.data.copy_(value)
        held.filled += 1
        if held.filled == len(held.unit.entries) and self._cuts_parameters:
            self._keep_own(held)
        return place

    def attach(self, held: Members, uses: Callable[[nn.Parameter], int]) -> None:
        """Take the model's parameters. uses: by parameter, how many gradients a micro-batch brings"""
        for entry, parameter in held:
            unit = next(each for each in self._held if entry in each.unit.entries)
            unit.members.append((entry, parameter))
            unit.expected += uses(parameter)
            self._of_parameter[parameter] = entry, unit
            parameter.register_post_accumulate_grad_hook(self.arrived)
            if unit.summands is not None:
                parameter.grad = unit.segment(entry, unit.summands, self._part)
        for each in self._held:
            for entry, first, stop in each.unit.pieces(self._part, self._shard.rank):
                piece = nn.Parameter(each.own[first:stop])
                piece.grad = each.gradient[first:stop]
                self.trained.append((entry, piece))

    def start(self, backwards: int) -> None:
        """Forget the last step's gradients; this step has so many backward passes on this rank."""
        self._backwards = backwards
        for held in self._held:
            held.arrived = 0
            (held.gradient if held.summands is None else held.summands).zero_()

    def arrived(self, parameter: nn.Parameter) -> None:
        """A gradient has been added to a parameter's. Called by autograd's hook, or by who adds without it."""
        entry, held = self._of_parameter[parameter]
        if self._cuts_gradients:
            if held.summands is None:
                held.summands = self._zeros(held.unit.size)
            assert parameter.grad is not None
            held.segment(entry, held.summands, self._part).add_(parameter.grad)
            parameter.grad = None
        held.arrived += 1
        if held.arrived == held.expected * (1 if self._cuts_gradients else self._backwards):
            self._reduce(held)

    def _reduce(self, held: _Held) -> None:
        """Begin to sum a unit's gradients over the shard axis; of earlier ones, one may be under way."""
        assert held.summands is not None
        while len(self._reducing) > 1:
            self._take()
        mine = torch.empty_like(held.gradient)
        work = self._shard.start_reduce_scatter(mine, held.summands)
        self._reducing.append((work, mine, held.summands, held))
        held.arrived = -1  # nothing is left over
        if self._cuts_gradients:
            held.summands, held.arrived = None, 0

    def _take(self) -> None:
        """Wait for the oldest reduction under way, and take what came of it."""
        work, mine, _, held = self._reducing.pop(0)
        work.wait()
        if self._cuts_gradients:
            held.gradient += mine
        else:
            held.gradient.copy_(mine)

    def finish(self) -> None:
        """Reduce what is left and wait: the gradients of `trained` are complete when this returns."""
        for held in self._held:
            if held.summands is not None and held.arrived >= 0:
                self._reduce(held)
        while self._reducing:
            self._take()
        for work in [self._replicate.start_sum(held.gradient) for held in self._held]:
            work.wait()
        self._rest()

    def publish(self) -> None:
        """After an update: give the other ranks this one's pieces."""
        if self._cuts_parameters:
            return
        for work in [self._shard.start_all_gather(held.whole.data, held.own.data) for held in self._held]:
            work.wait()

    def run(self, place: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute a place of the model with its parameters here, and have them here again for its backward."""
        if not self._cuts_parameters:
            return function(x)
        self._use(place, 1)
        y = function(x)
        if place >= 0 and y.requires_grad:  # an embedding's backward needs no values
            y.register_hook(lambda _: self._use(place, -1))
        return y

    def _use(self, place: int, direction: int) -> None:
        """Have a place's parameters here, begin to gather those of the next one, and free all others."""
        ahead = max(place + direction, 0)  # not the embedding's in a backward, which needs no values
        for held in self._held:
            if held.here and not {place, ahead} & set(held.unit.places):
                self._wait(held)
                _free(held)
        for wanted in (place, ahead):
            for held in self._held:
                if wanted in held.unit.places and not held.here:
                    _make_room(held)
                    held.gathering = self._shard.start_all_gather(held.whole.data, held.own.data)
        for held in self._held:
            if place in held.unit.places:
                self._wait(held)

    def gathered(self) -> Iterator[Members]:
        """What the models hold, group by group, each whole while it is looked at; what is written to it is kept.

        All ranks of the shard axis must go through it together.
        """
        if not self._cuts_parameters:
            yield [member for held in self._held for member in held.members]
            return
        for held in self._held:
            _make_room(held)
            self._shard.start_all_gather(held.whole.data, held.own.data).wait()
            yield held.members
            self._keep_own(held)

    def _rest(self) -> None:
        """Free what is gathered."""
        for held in self._held:
            if self._cuts_parameters and held.here:
                self._wait(held)
                _free(held)

    def _keep_own(self, held: _Held) -> None:
        """Take this rank's piece out of the whole unit, and free the rest."""
        held.own.data.copy_(held.whole.data[self._shard.rank * held.unit.owned :][: held.unit.owned])
        _free(held)

    @staticmethod
    def _wait(held: _Held) -> None:
        if held.gathering is not None:
            held.gathering.wait()
            held.gathering = None


# Autograd has saved views of `whole` for backward. They see the values again once its memory is back, as long as
# autograd doesn't take that for a change: hence `.data`, which counts no versions, wherever `whole` is written.


def _free(held: _Held) -> None:
    held.whole.untyped_storage().resize_(0)
    held.here = False


def _make_room(held: _Held) -> None:
    held.whole.untyped_storage().resize_(held.unit.size * held.whole.element_size())
    held.here = True
