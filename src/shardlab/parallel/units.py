"""What ZeRO cuts: the parameters of one place of the model, laid end to end in one flat buffer.

A place is the embedding, a layer, or norm and head; a unit is gathered, reduced and freed as a whole. The buffer is
padded to a multiple of the ranks of the shard axis, and each of them owns an equal, consecutive piece, wherever that
begins or ends within a parameter. A tied weight, which two places use, is a unit of its own: then its pieces lie alike
on both ends of a pipeline.

From the table alone, without torch: the plan counts memory and bytes by the same units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from shardlab.parallel.part import Part
from shardlab.parallel.table import Entry, ParameterTable


@dataclass(frozen=True)
class Unit:
    """Parameters that lie in one buffer.

    places: where they are used; several for a tied weight
    entries: in the table's order
    starts: where each begins in the buffer, in elements
    size: elements of the buffer, padding included; owned: of a rank's piece
    """

    places: tuple[int, ...]
    entries: tuple[Entry, ...]
    starts: tuple[int, ...]
    size: int
    owned: int

    def pieces(self, part: Part, rank: int) -> Iterable[tuple[Entry, int, int]]:
        """What of each entry is in a rank's piece, counted from the piece's beginning: (entry, first, stop)."""
        begin = rank * self.owned
        for entry, start in zip(self.entries, self.starts, strict=True):
            first = max(start, begin)
            stop = min(start + math.prod(part.shape(entry)), begin + self.owned)
            if first < stop:
                yield entry, first - begin, stop - begin


def units(table: ParameterTable, part: Part, ranks: int) -> list[Unit]:
    """The units of what a part holds, in the order of their first place. ranks: of the shard axis"""
    tied = {entry.tied_to: entry.layer for entry in table if entry.tied_to is not None}
    groups: dict[tuple[bool, tuple[int, ...]], list[Entry]] = {}
    for entry in table.own:
        is_tied = entry.name in tied
        used = (entry.layer, tied[entry.name]) if is_tied else (entry.layer,)
        if places := tuple(place for place in used if place in part.layers):
            groups.setdefault((is_tied, places), []).append(entry)
    return [_unit(places, entries, part, ranks) for (_, places), entries in groups.items()]


def _unit(places: tuple[int, ...], entries: list[Entry], part: Part, ranks: int) -> Unit:
    *starts, end = accumulate((math.prod(part.shape(entry)) for entry in entries), initial=0)
    owned = -(-end // ranks)
    return Unit(places, tuple(entries), tuple(starts), owned * ranks, owned)
