"""A step of a rank whose axis shards, walked through in elements: what is gathered and reduced, and the most it holds.

The walk does what parallel/shard.py does, event by event, with sizes instead of tensors: a place is computed, a
gradient arrives, a unit is reduced. tests/parity/test_planned.py holds the one against the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from shardlab.analysis.work import Work
from shardlab.config.schema import ShardLevel
from shardlab.parallel.schedule import Action, Kind
from shardlab.parallel.table import Entry
from shardlab.parallel.units import Unit, units


@dataclass(frozen=True)
class Walked:
    """What came of a walk.

    units: of this rank; reduced, gathered: how often each of them was, by its number
    parameters, gradients: elements that were held when both together were most
    """

    units: list[Unit]
    reduced: Counter[int]
    gathered: Counter[int]
    parameters: int
    gradients: int


@lru_cache(maxsize=16)  # the ranks of a shard axis walk alike, and memory and traffic ask for the same
def walk(work: Work, pipeline: int) -> Walked:
    """A step under ZeRO. pipeline: the rank's number on that axis"""
    return _Walk(work, pipeline).done()


def is_matrix(entry: Entry) -> bool:
    """Whether a parameter is the matrix of a product, whose gradient weight_gradients.py computes."""
    return entry.layer >= 0 and len(entry.shape) > 1


class _Walk:
    def __init__(self, work: Work, pipeline: int) -> None:
        level = work.config.strategy.shard_level
        self._cuts_gradients = level is not ShardLevel.optimizer
        self._cuts_parameters = level is ShardLevel.parameters
        self._part = work.part(pipeline)
        self._units = units(work.table, self._part, work.mesh.shard)
        self._uses = _uses(work, self._part.layers)
        self._unit_of = {entry.name: number for number, unit in enumerate(self._units) for entry in unit.entries}
        self._expected = Counter(self._unit_of[entry.name] for uses in self._uses.values() for entry, _ in uses)
        self._backwards = work.cut.each
        self._arrived: Counter[int] = Counter()
        self._here: set[int] = set()
        self._summands: set[int] = set() if self._cuts_gradients else set(range(len(self._units)))
        self._under_way: list[tuple[int, bool]] = []
        self._reduced: Counter[int] = Counter()
        self._gathered: Counter[int] = Counter()
        self._most = 0, 0
        # What is always there; a look adds what comes and goes.
        self._parameters = sum(unit.owned if self._cuts_parameters else unit.size for unit in self._units)
        self._gradients = sum(unit.owned for unit in self._units) if self._cuts_gradients else 0
        for action in work.actions(pipeline):
            self._do(action, work.stages[action.stage])
        for number in sorted(self._summands):
            if self._cuts_gradients or not self._reduced[number]:
                self._reduce(number)

    def done(self) -> Walked:
        return Walked(self._units, self._reduced, self._gathered, *self._most)

    def _do(self, action: Action, places: range) -> None:
        if action.kind is Kind.F:
            for place in places:
                self._use(place, 1)
            return
        for place in reversed(places):
            if place >= 0 and action.kind is not Kind.W:
                self._use(place, -1)
            for entry, put_off in self._uses.get(place, []):
                if action.kind is Kind.B or put_off is (action.kind is Kind.W):
                    self._arrive(entry)

    def _use(self, place: int, direction: int) -> None:
        """See Sharded._use."""
        if not self._cuts_parameters:
            return
        wanted = {place, max(place + direction, 0)}
        self._here = {number for number in self._here if wanted & set(self._units[number].places)}
        for number, unit in enumerate(self._units):
            if wanted & set(unit.places) and number not in self._here:
                self._here.add(number)
                self._gathered[number] += 1
        self._look()

    def _arrive(self, entry: Entry) -> None:
        """See Sharded.arrived. The gradient that arrives has memory of its own while it is added."""
        number = self._unit_of[entry.name]
        if self._cuts_gradients:
            self._summands.add(number)
        self._look(math.prod(self._part.shape(entry)))
        self._arrived[number] += 1
        if self._arrived[number] == self._expected[number] * (1 if self._cuts_gradients else self._backwards):
            self._reduce(number)

    def _reduce(self, number: int) -> None:
        """See Sharded._reduce: of those before, one may be under way."""
        self._under_way = [*self._under_way[-1:], (number, self._cuts_gradients)]
        self._reduced[number] += 1
        self._arrived[number] = 0
        if self._cuts_gradients:
            self._summands.discard(number)
        self._look()

    def _look(self, arriving: int = 0) -> None:
        """Is this the most so far?"""
        parameters = self._parameters + sum(self._units[number].size for number in self._here)
        gradients = self._gradients + sum(self._units[number].size for number in self._summands)
        for number, holds_summands in self._under_way:
            unit = self._units[number]
            gradients += unit.owned + (unit.size if holds_summands else 0)
        gradients += arriving
        if parameters + gradients > sum(self._most):
            self._most = parameters, gradients


def _uses(work: Work, places: Collection[int]) -> dict[int, list[tuple[Entry, bool]]]:
    """By place: the parameters whose gradients arrive there, in the order of a backward pass, each with whether it may
    be put off."""
    found: dict[int, list[tuple[Entry, bool]]] = {}
    for entry in reversed(list(work.table)):
        if entry.layer in places:
            owner = work.table[entry.tied_to] if entry.tied_to else entry
            found.setdefault(entry.layer, []).append((owner, work.products and is_matrix(entry)))
    return found
