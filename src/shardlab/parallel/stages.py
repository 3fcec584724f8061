"""Cutting the layers into pipeline stages.

A stage is a run of consecutive layers; the first one has the embedding too, the last one the final norm and the
head. The slowest stage sets the pace of the others, so the cut makes the largest stage's cost as small as it can be,
but no stage may hold much more than its share of the parameters where another cut avoids it: memory is why most
models are piped at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

LARGEST_SHARE = 1.2
"""Most parameters of a stage, as a multiple of an even share, where some cut keeps to it."""


@dataclass(frozen=True)
class Cost:
    """What a place along the pipeline (embedding, layer or head) costs: time, in any unit, and elements held."""

    time: float
    elements: int


def cut(places: list[Cost], stages: int) -> list[int]:
    """How many layers each stage gets.

    places: of the embedding, each layer, and norm and head together, in this order
    stages: at most two more than there are layers: the ends may hold embedding or head alone, the others need a layer

    Of cuts that are equally fast it is the one with the most even memory.
    """
    times = list(accumulate((place.time for place in places), initial=0.0))
    elements = list(accumulate((place.elements for place in places), initial=0))

    def held(first: int, stop: int) -> float:
        return elements[stop] - elements[first]

    def time(first: int, stop: int) -> float:
        return times[stop] - times[first] if held(first, stop) <= most else math.inf

    def held_in_time(first: int, stop: int) -> float:
        return held(first, stop) if time(first, stop) <= fastest else math.inf

    layers = len(places) - 2
    least, _ = _smallest_largest(layers, stages, held)
    most = max(least, LARGEST_SHARE * elements[-1] / stages)
    fastest, _ = _smallest_largest(layers, stages, time)
    _, split = _smallest_largest(layers, stages, held_in_time)
    return split


def _smallest_largest(layers: int, stages: int, cost: Callable[[int, int], float]) -> tuple[float, list[int]]:
    """The cut whose largest stage costs least, and that cost; of equal ones the one with more layers in front.

    cost: of the places [first, stop), where place 0 is the embedding and layers + 1 the head
    """

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The same for the places from `first` on, over `left` stages."""
        if left == 1:
            return cost(first, layers + 2), (layers + 1 - max(1, first),)
        found: tuple[float, tuple[int, ...]] = math.inf, ()
        least = first + 1
        for stop in range(layers + 1 - (left - 2), least - 1, -1):
            rest, split = best(stop, left - 1)
            largest = max(cost(first, stop), rest)
            if largest < found[0] or not found[1]:
                found = largest, (stop - first - (first == 0), *split)
        return found

    largest, split = best(0, stages)
    return largest, list(split)


def stage_ranges(split: list[int]) -> list[range]:
    """The places of each stage, -1 (embedding) to n_layers (norm and head), from the layers that each gets."""
    bounds = [-1, *list(accumulate(split))[:-1], sum(split) + 1]
    return [range(first, stop) for first, stop in pairwise(bounds)]
