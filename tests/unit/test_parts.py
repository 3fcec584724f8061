"""What a rank holds of the model: the cut into stages, slices of parameters, their first values and their masks."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardlab.config.schema import Activation, Norm, Positions
from shardlab.models.cost import place_costs
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.models.transformer import Transformer
from shardlab.parallel.axis import Axis
from shardlab.parallel.dropout import Masks, step_keys
from shardlab.parallel.part import Part
from shardlab.parallel.stages import LARGEST_SHARE, Cost, cut, stage_ranges
from shardlab.parallel.table import Constant, Entry, Normal, Uniform
from shardlab.parallel.values import draw, initial_value

SMALL_AT_WIKITEXT2 = Shape(8, 256, 4, 1024, 0.1, Norm.post, Activation.relu, Positions.sinusoidal, False, 28782, 0, 64)
TUTORIAL = Shape(12, 4096, 16, 4096, 0.2, Norm.post, Activation.relu, Positions.sinusoidal, False, 28782, 0, 25)
CLASSIFIER = Shape(4, 64, 4, 128, 0.1, Norm.pre, Activation.gelu, Positions.learned, False, 300, 2, 32)


def all_cuts(layers: int, stages: int) -> list[list[int]]:
    """Every way to cut, by another road: bars between the layers."""
    places = layers + 2
    cuts = [[0, *bars, places] for bars in combinations(range(1, places), stages - 1)]
    sizes = [[b - a for a, b in pairwise(bars)] for bars in cuts]
    return [[n - (s == 0) - (s == stages - 1) for s, n in enumerate(size)] for size in sizes]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", range(8))
def test_no_cut_within_the_memory_bound_is_faster_or_as_fast_and_more_even(stages, seed):
    generator = torch.Generator().manual_seed(seed)
    times, sizes = torch.randint(1, 40, (2, 7), generator=generator).tolist()
    places = [Cost(time, size) for time, size in zip(times, sizes, strict=True)]

    def largest(split: list[int], values: list[int]) -> int:
        return max(sum(values[place + 1] for place in run) for run in stage_ranges(split))

    found = cut(places, stages)
    candidates = all_cuts(5, stages)
    assert found in candidates
    least = min(largest(split, sizes) for split in candidates)
    bound = max(least, LARGEST_SHARE * sum(sizes) / stages)
    allowed = [split for split in candidates if largest(split, sizes) <= bound]
    assert found in allowed
    fastest = min(largest(split, times) for split in allowed)
    assert largest(found, times) == fastest
    assert largest(found, sizes) == min(largest(s, sizes) for s in allowed if largest(s, times) == fastest)


def test_stages_cover_every_place_once():
    assert stage_ranges([2, 3]) == [range(-1, 2), range(2, 6)]
    assert stage_ranges([0, 4, 0]) == [range(-1, 0), range(0, 4), range(4, 5)]
    assert stage_ranges([4]) == [range(-1, 5)]


@pytest.mark.parametrize(("shape", "split"), [(SMALL_AT_WIKITEXT2, [6, 2]), (TUTORIAL, [7, 5])])
def test_the_heads_cost_counts_and_memory_bounds_it(shape, split):
    places = place_costs(shape, parameter_table(shape))
    assert cut(places, 2) == split
    held = [sum(places[place + 1].elements for place in run) for run in stage_ranges(split)]
    assert max(held) <= 0.6 * sum(held)


@pytest.mark.parametrize("shape", [SMALL_AT_WIKITEXT2, CLASSIFIER])
def test_operations_of_a_place_are_those_that_torch_counts(shape):
    model = Transformer(shape)
    rows = 3
    with FlopCounterMode(display=False) as counter:
        lengths = torch.full((rows,), shape.max_len, device="meta")
        model(torch.zeros(rows, shape.max_len, dtype=torch.int64, device="meta"), lengths)
    counted = place_costs(shape, parameter_table(shape))
    multiplied = sum(place.time for place in counted[1:])  # the embedding only scales and adds
    assert counter.get_total_flops() == pytest.approx(rows * shape.max_len * multiplied, rel=1e-12)


def test_elements_of_the_places_are_the_tables():
    table = parameter_table(TUTORIAL)
    assert sum(place.elements for place in place_costs(TUTORIAL, table)) == table.elements == 1_444_261_998


LAWS = [Uniform(0.3), Normal(2.0), Constant(0.5)]
SHAPES = [
    # shape of the whole, dim that is cut, ranks
    ((6, 5), 0, 2),
    ((7, 5), 0, 3),
    ((5, 3), 0, 4),  # the last rank holds padding alone
    ((3, 4, 2, 5), 1, 4),
    ((5, 4, 3), 1, 2),
    ((9, 8), 1, 2),
    ((11,), 0, 2),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize(("shape", "dim", "ranks"), SHAPES)
def test_a_slices_first_values_are_those_of_the_whole(law, shape, dim, ranks):
    entry = Entry("some.weight", shape, law, 0, tensor_dim=dim)
    whole = initial_value(entry, 7)
    rebuilt = torch.full_like(whole, math.nan)
    for rank in range(ranks):
        part = Part(range(-1, 2), Axis("tensor", rank, ranks))
        own = initial_value(entry, 7, part)
        assert own.shape == part.shape(entry)
        rebuilt[part.index(entry)] = own[part.valid(entry)]
        own[part.valid(entry)] = 0.0
        assert not own.any(), "padding must be zero"
    assert torch.equal(rebuilt, whole)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_a_laws_values_are_one_stream(law):
    once, twice = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    parts = [draw(law, count, twice) for count in (1, 17, 2, 80)]
    assert torch.equal(draw(law, 100, once), torch.cat(parts))


def test_normal_values_are_normal():
    values = draw(Normal(2.0), 200_000, torch.Generator().manual_seed(0)) / 2
    assert float(values.mean()) == pytest.approx(0, abs=0.01)
    assert float(values.square().mean()) == pytest.approx(1, abs=0.015)
    assert float(values.pow(4).mean()) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 6, 6), 1), ((3, 5, 8), 2)], ids=["heads", "features"])
def test_a_slice_is_dropped_as_in_the_whole(shape, dim):
    masks = Masks(step_keys(0, 1, ["a", "b"], torch.device("cpu")), torch.arange(3), 0.3)
    x = torch.rand(shape) + 1
    whole = masks.drop(x, 1)
    half = shape[dim] // 2
    for first in (0, half):
        own = masks.drop(x.narrow(dim, first, half), 1, dim=dim, first=first)
        assert torch.equal(own, whole.narrow(dim, first, half))
