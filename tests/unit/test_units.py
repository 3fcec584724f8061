"""What ZeRO cuts: every element of every parameter is owned by one rank, and by one alone."""

from collections import Counter
from dataclasses import replace

import pytest

from shardlab.config.schema import Activation, Norm, Positions
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.parallel.axis import Axis
from shardlab.parallel.part import Part
from shardlab.parallel.stages import stage_ranges
from shardlab.parallel.table import Constant, Entry, ParameterTable
from shardlab.parallel.units import Unit, units

ODD = Shape(3, 6, 2, 10, 0.0, Norm.pre, Activation.relu, Positions.learned, False, 11, 0, 7)
CLASSES = replace(ODD, classes=3, norm=Norm.post, positions=Positions.sinusoidal)
TIED = replace(ODD, tie=True)
WHOLE = Part(range(-1, 4))
PARTS = [WHOLE, Part(range(-1, 1)), Part(range(1, 4)), Part((-1, 3)), Part(range(-1, 4), Axis("tensor", 1, 2))]


def owners(unit: Unit, part: Part, ranks: int) -> Counter[tuple[str, int]]:
    """How many ranks own each element, by its parameter and number there."""
    count: Counter[tuple[str, int]] = Counter()
    for rank in range(ranks):
        for entry, first, stop in unit.pieces(part, rank):
            assert 0 <= first < stop <= unit.owned
            offset = rank * unit.owned - unit.starts[unit.entries.index(entry)]
            count.update((entry.name, offset + place) for place in range(first, stop))
    return count


def elements(entry: Entry, part: Part) -> int:
    """Of what a part holds, by another road: one factor after the other."""
    count = 1
    for size in part.shape(entry):
        count *= size
    return count


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{[*part.layers]} of {part.axis.ranks}")
@pytest.mark.parametrize("shape", [ODD, CLASSES, TIED], ids=["odd", "classes", "tied"])
def test_the_pieces_of_all_ranks_are_every_element_once(shape, part, ranks):
    table = parameter_table(shape)
    found: Counter[tuple[str, int]] = Counter()
    for unit in units(table, part, ranks):
        assert unit.size == ranks * unit.owned
        assert unit.size - sum(elements(entry, part) for entry in unit.entries) < ranks, "least padding"
        found += owners(unit, part, ranks)
    ends = {entry.tied_to: entry.layer for entry in table if entry.tied_to}
    here = [e for e in table.own if e.layer in part.layers or ends.get(e.name) in part.layers]
    assert found == Counter((entry.name, place) for entry in here for place in range(elements(entry, part)))


def test_a_unit_is_a_place():
    """What is gathered together is computed together."""
    for shape in (ODD, CLASSES):
        made = units(parameter_table(shape), WHOLE, 2)
        assert [unit.places for unit in made] == [(-1,), (0,), (1,), (2,), (3,)]
        assert all({entry.layer for entry in unit.entries} == {*unit.places} for unit in made)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_tied_weight_is_a_unit_of_its_own_and_lies_alike_at_both_ends(ranks):
    """Pieces of different offsets would add another element's gradient (parallel/tied.py)."""
    table = parameter_table(TIED)
    ends = [Part(stage) for stage in stage_ranges([2, 1])]
    tied = []
    for part, place in zip(ends, (-1, 3), strict=True):
        [unit] = [unit for unit in units(table, part, ranks) if "embedding.weight" in [e.name for e in unit.entries]]
        assert unit.places == (place,)
        assert len(unit.entries) == 1
        tied.append([[*unit.pieces(part, rank)] for rank in range(ranks)])
    assert tied[0] == tied[1]
    [both] = [unit for unit in units(table, WHOLE, ranks) if len(unit.places) > 1]
    assert both.places == (-1, 3)
    assert [[*both.pieces(WHOLE, rank)] for rank in range(ranks)] == tied[0]


def test_a_rank_may_own_nothing_of_a_unit():
    table = ParameterTable()
    table.add(Entry("a", (2,), Constant(0.0), layer=0))
    table.add(Entry("b", (2,), Constant(0.0), layer=0))
    [unit] = units(table, Part(range(1)), 5)
    owned = [[(entry.name, first, stop) for entry, first, stop in unit.pieces(Part(range(1)), r)] for r in range(5)]
    assert owned == [[("a", 0, 1)], [("a", 0, 1)], [("b", 0, 1)], [("b", 0, 1)], []]
