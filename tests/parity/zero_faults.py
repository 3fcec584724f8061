"""Faults of ZeRO's levels, and of the ring."""

from __future__ import annotations

import torch

import shardlab.parallel.ring as ring
from shardlab.parallel.shard import Sharded, _free


def take_the_next_piece() -> None:
    """Level 3: the second rank keeps a piece that begins an element late."""

    def careless(self: Sharded, held):
        late = self._shard.rank > 0
        whole = held.whole.data.roll(-1) if late else held.whole.data
        held.own.data.copy_(whole[self._shard.rank * held.unit.owned :][: held.unit.owned])
        _free(held)

    Sharded._keep_own = careless  # type: ignore[method-assign]


def keep_the_last_micro_batch() -> None:
    """Levels 2 and 3: what a later micro-batch brings takes the place of the earlier ones' gradients."""
    take = Sharded._take

    def careless(self: Sharded):
        self._reducing[0][3].gradient.zero_()
        take(self)

    Sharded._take = careless  # type: ignore[method-assign]


def keep_the_update() -> None:
    """Level 1 and 2: the other ranks never get a rank's new parameters."""
    Sharded.publish = lambda self: None  # type: ignore[method-assign]


def forget_the_copies() -> None:
    """shard x replicate: gradients are summed over one of the two axes."""
    finish = Sharded.finish

    def careless(self: Sharded):
        replicate, self._replicate = self._replicate, type(self._replicate)("replicate")
        finish(self)
        self._replicate = replicate

    Sharded.finish = careless  # type: ignore[method-assign]


def free_too_late() -> None:
    """Level 3: a place is computed with the parameters that it had in the last step."""
    use = Sharded._use
    seen: dict[int, torch.Tensor] = {}

    def careless(self: Sharded, place, direction):
        use(self, place, direction)
        for number, held in enumerate(self._held):
            if place in held.unit.places and direction == 1:
                fresh = held.whole.data.clone()
                held.whole.data.copy_(seen.get(number, fresh))
                seen[number] = fresh

    Sharded._use = careless  # type: ignore[method-assign]


def add_a_chunk_twice() -> None:
    """The ring's first half adds each rank's own chunk once more."""
    reduce_scatter = ring._reduce_scatter

    def careless(chunks, axis, kind):
        own = chunks[axis.rank].clone()
        reduce_scatter(chunks, axis, kind)
        chunks[axis.rank] += own

    ring._reduce_scatter = careless


def miss_a_turn() -> None:
    """The ring's second half ends a turn early: a chunk stays half summed."""

    def careless(chunks, axis, kind):
        for turn in range(axis.ranks - 2):
            own, next_one = (axis.rank - turn) % axis.ranks, (axis.rank - turn - 1) % axis.ranks
            ring._turn(chunks[own], chunks[next_one], axis, kind)

    ring._all_gather = careless


ZERO_FAULTS = (take_the_next_piece, keep_the_last_micro_batch, keep_the_update, forget_the_copies, free_too_late)
RING_FAULTS = (add_a_chunk_twice, miss_a_turn)
