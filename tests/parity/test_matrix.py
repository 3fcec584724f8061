"""The parity matrix covers every pair of options, and a part of it runs here; `make parity` runs all of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from matrix import AXIS_OF, FACTORS, REFUSED, UNUSED, generate, impossible, quick, read, shown, sizes, uncovered
from run_matrix import hold, name_of, references

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import AXES, Config, Schedule, ShardLevel, Task
from shardlab.errors import ShardlabError
from shardlab.models.shape import shape_of

QUICK = quick(read(), 22)


@pytest.fixture(scope="module")
def singles(tmp_path_factory):
    return references(tmp_path_factory.mktemp("references"), QUICK)


@pytest.mark.parametrize("row", QUICK, ids=shown)
def test_a_mix_is_the_same_run_as_one_process(row, singles, tmp_path):
    hold(tmp_path / "run", row, singles[name_of(row)])


def test_the_table_is_what_its_generator_makes():
    assert read() == generate()


def test_every_value_is_in_the_quick_part():
    for factor, values in FACTORS.items():
        assert {row[factor] for row in QUICK} == set(values)


UNCOVERED = [dict(pair) for pair in uncovered(read())]


def test_a_pair_in_no_row_has_one_of_the_known_reasons():
    assert {impossible(pair) for pair in UNCOVERED} == {*REFUSED, *UNUSED}


@pytest.fixture(scope="module")
def plain() -> Config:
    """A config that nothing is asked of yet."""
    overrides = ["strategy=hybrid", "dataset=synthetic", "trainer.global_batch=13", "trainer.micro_batch=4"]
    return compose(overrides).config


def asked(plain: Config, pair: dict[str, str]) -> Config:
    """The config that asks for a pair, and for what a pair of options of a pipeline needs."""
    of_pipeline = any(AXIS_OF.get(factor) == "pipeline" for factor in pair)
    mesh = sizes(pair.get("mesh", "pipeline2" if of_pipeline else "replicate2"))
    strategy = replace(plain.strategy, **{axis: mesh.get(axis, 1) for axis in AXES})
    if "stages_per_rank" in pair:
        strategy.stages_per_rank, strategy.schedule = int(pair["stages_per_rank"]), Schedule["looped_bfs"]
    if "schedule" in pair:
        strategy.schedule = Schedule[pair["schedule"]]
    if pair.get("split") == "uneven":
        strategy.split = [3, 1]
    if "shard_level" in pair:
        strategy.shard_level = ShardLevel[pair["shard_level"]]
    strategy.sequence_parallel = pair.get("sequence_parallel") == "true"
    task = Task[pair.get("task", "language_model")]
    return replace(
        plain,
        ranks=math.prod(mesh.values()),
        strategy=strategy,
        model=replace(plain.model, tie=pair.get("tie") == "true"),
        dataset=replace(plain.dataset, task=task),
    )


def pairs_without(reason: str) -> list[dict[str, str]]:
    return [pair for pair in UNCOVERED if impossible(pair) == reason]


@pytest.mark.parametrize("reason", REFUSED)
def test_a_pair_that_cannot_be_is_refused_with_the_reason(reason, plain):
    for pair in pairs_without(reason):
        with pytest.raises(ShardlabError, match=REFUSED[reason]):
            check(asked(plain, pair))


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_what_only_a_missing_axis_would_use_is_as_if_not_named(axis, plain):
    for pair in pairs_without(f"no {axis} axis"):
        mesh = {"mesh": pair["mesh"]}
        assert check(asked(plain, pair)).strategy == check(asked(plain, mesh)).strategy


def test_the_rest_is_accepted_and_means_nothing(plain):
    for pair in pairs_without("no shard axis"):
        assert check(asked(plain, pair)).strategy.shard == 1
    for pair in pairs_without("no embedding to tie"):
        config = check(asked(plain, pair))
        assert not shape_of(config.model, 100, 2, 16).tie
