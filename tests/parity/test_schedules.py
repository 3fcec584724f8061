"""The executor (parallel/pipeline.py) with real ranks, under every schedule: one process's bits, and its own errors.

Every schedule adds a stage's gradients in the order of the micro-batches, as one process does, and a split backward
does the same products (parallel/weight_gradients.py): so all eight are claimed bit for bit, at one thread. Not where
one rank has both ends of a tied weight: one process adds the two uses of a micro-batch first, a pipeline all uses
in the order in which they come. Nor under data parallel axes, where the sums are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from inside import batches, begin, in_ranks, prepared, whole_weights

from shardlab.config.schema import Config
from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.parallel.orders import SCHEDULES, runnable
from shardlab.training.evaluation import evaluate
from shardlab.training.place import Place
from shardlab.training.step import train_step

SMALL = ["seed=3", "model=tiny", "model.n_layers=3", "model.d_model=16", "model.d_ff=32", "model.dropout=0.2"]
SMALL += ["trainer.clip=0.1", "optimizer=adamw"]
ROWS = ["dataset=synthetic", "dataset.task=classifier", "dataset.train_rows=100"]
TASKS = {
    "language": ["dataset=pydoc", "trainer.global_batch=13", "trainer.micro_batches=8"],
    # Rows of many lengths: the third step is of another shape, and has 20 rows in 7 micro-batches, which the
    # interleaved schedules can't cut into rounds.
    "ragged": [*ROWS, "trainer.global_batch=40", "trainer.micro_batch=3"],
    # A third step of one micro-batch, fewer than 1f1b and dualpipev need.
    "short": [*ROWS, "trainer.global_batch=48", "trainer.micro_batch=6"],
}
HELD = {name: 1 if name in ("naive", "gpipe", "1f1b") else 2 for name in SCHEDULES}
"""Stages a rank."""
SPLITS = {1: "[1,2]", 2: "[0,2,1,0]"}
"""Uneven, and with ends that have no layer, by stages a rank."""


@dataclass
class Story:
    """What a rank saw. losses: with norms; weights: what it holds in the end, in bytes; micro_batches: of each step"""

    losses: list[tuple[float, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)


def story(place: Place, tasks: list[tuple[Config, Path]]) -> list[Story]:
    """Train three steps on each task, and evaluate before, between and after them."""
    return [_story(place, config, data_dir) for config, data_dir in tasks]


def _story(place: Place, config: Config, data_dir: Path) -> Story:
    training, told = begin(place, config, data_dir), Story()
    told.evaluations.append(evaluate(training, "val", 2))
    for step, batch in batches(training, 3):
        result = train_step(training, batch, step, 1e-2)
        told.losses.append((result.loss, result.grad_norm))
        told.micro_batches.append(len(training.micro_batches(batch)))
        told.shapes.append(tuple(batch.inputs.shape))
        told.evaluations.append(evaluate(training, "val", 2))
    told.weights = {name: value.numpy().tobytes() for name, value in whole_weights(training).items()}
    return told


def told(strategy: list[str], folder: Path, tasks: dict[str, list[str]]) -> list[list[Story]]:
    """By rank, its story of each task."""
    configs = [prepared([*SMALL, *task, *strategy]) for task in tasks.values()]
    return run_ranks("test_schedules:story", (configs,), configs[0][0].ranks, log_dir=folder)


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> list[Story]:
    """By task, in one process."""
    [stories] = told(["strategy=single"], tmp_path_factory.mktemp("single"), TASKS)
    return stories


def test_the_tasks_are_what_they_are_said_to_be(single):
    """Or the tests below prove less."""
    assert [each.micro_batches for each in single] == [[8, 8, 8], [14, 14, 7], [8, 8, 1]]
    assert len({width for _, width in single[1].shapes}) > 1
    counts = (14, 8, 7, 1)
    instead = {(name, count): runnable(name, 2, HELD[name], count) for name in SCHEDULES for count in counts}
    assert {key: other for key, other in instead.items() if other != key[0]} == {
        ("interleaved_1f1b", 7): "looped_bfs",
        ("interleaved_zero_bubble", 7): "looped_bfs",
        ("1f1b", 1): "gpipe",
        ("dualpipev", 1): "zbv",
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_bit_identical_to_one_process(schedule, single, tmp_path):
    preset = "pipeline_naive" if schedule == "naive" else "pipeline"
    split = SPLITS[HELD[schedule]]
    strategy = [f"strategy={preset}", "ranks=2", f"strategy.schedule={schedule}", f"strategy.split={split}"]
    for one, *ranks in zip(single, *told(strategy, tmp_path, TASKS), strict=True):
        assert all(rank.losses == one.losses and rank.evaluations == one.evaluations for rank in ranks)
        weights = [*ranks[0].weights.items(), *ranks[1].weights.items()]
        assert sorted(name for name, _ in weights) == sorted(one.weights)
        assert [name for name, value in weights if value != one.weights[name]] == []


def fails(place: Place, config: Config, data_dir: Path, stage: int, where: str) -> None:
    """Train a step in which a stage's third forward, or the backward of it, raises."""
    training = begin(place, config, data_dir)
    if model := training.models.get(stage):
        calls = 0
        forward = model.forward

        def faulty(*args, **kwargs):
            nonlocal calls
            calls += 1
            y = forward(*args, **kwargs)
            if calls != 3:
                return y
            if where == "forward":
                raise ArithmeticError(f"stage {stage} can't count to three")
            y.register_hook(_raise)
            return y

        def _raise(_) -> None:
            raise ArithmeticError(f"stage {stage} can't count to three")

        model.forward = faulty
    [(step, batch)] = batches(training, 1)
    train_step(training, batch, step, 0.1)


@pytest.mark.parametrize(
    ("schedule", "stage", "where", "rank"),
    [("1f1b", 0, "forward", 0), ("1f1b", 1, "backward", 1), ("zbv", 3, "forward", 0), ("zbv", 1, "backward", 1)],
)
def test_an_exception_in_a_stage_is_the_reported_cause(schedule, stage, where, rank, tmp_path):
    """Not the broken connection that the other rank then sees."""
    overrides = [*SMALL, *TASKS["language"], "strategy=pipeline", "ranks=2", f"strategy.schedule={schedule}"]
    with pytest.raises(RanksFailed) as failed:
        in_ranks("test_schedules:fails", overrides, tmp_path, stage, where)
    assert failed.value.rank == rank
    assert f"stage {stage} can't count to three" in failed.value.reason


def tied_copies(place: Place, config: Config, data_dir: Path) -> list[bytes]:
    """The tied weight as this rank has it, after each of three steps; empty where it is another's."""
    training = begin(place, config, data_dir)
    seen = []
    for step, batch in batches(training, 3):
        train_step(training, batch, step, 1e-2)
        weights = whole_weights(training)
        seen.append(weights["embedding.weight"].numpy().tobytes() if "embedding.weight" in weights else b"")
    return seen


HYBRID = ["strategy=hybrid", "strategy.tensor=1", "ranks=4"]
TIES = [
    # strategy, ranks that hold the weight
    (["strategy=pipeline", "ranks=3"], {0, 2}),
    (["strategy=pipeline", "ranks=2", "strategy.schedule=interleaved_zero_bubble"], {0, 1}),
    (["strategy=pipeline", "ranks=2", "strategy.schedule=zbv"], {0}),
    ([*HYBRID, "strategy.replicate=2", "strategy.reduce=ring"], {0, 1, 2, 3}),
    ([*HYBRID, "strategy.shard=2", "strategy.shard_level=parameters"], {0, 1, 2, 3}),
    ([*HYBRID, "strategy.shard=2", "strategy.shard_level=optimizer", "strategy.schedule=zbv"], {0, 1}),
]


@pytest.mark.parametrize(("strategy", "holders"), TIES, ids=lambda value: " ".join(map(str, value)))
def test_copies_of_a_tied_weight_are_equal_after_every_step(strategy, holders, tmp_path):
    found = in_ranks("test_schedules:tied_copies", [*SMALL, *TASKS["language"], "model.tie=true", *strategy], tmp_path)
    assert {rank for rank, seen in enumerate(found) if any(seen)} == holders
    first = found[min(holders)]
    assert len(set(first)) == 3, "each step moves it"
    assert all(found[rank] == first for rank in holders)
