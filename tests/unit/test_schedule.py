"""The grid of turns: under every schedule and at every size it is complete, in order, and can run."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from shardlab.parallel import orders as orders_module
from shardlab.parallel import schedule as schedule_module
from shardlab.parallel.orders import (
    SCHEDULES,
    STAGES_PER_RANK,
    forward_only,
    orders,
    placement,
    runnable,
    stages_per_rank,
)
from shardlab.parallel.schedule import (
    Action,
    Kind,
    Orders,
    bubble,
    gives,
    grid,
    needs,
    picture,
)

F, B, I, W = Kind  # noqa: E741


SETTINGS = [
    (schedule, ranks, held, micro_batches)
    for schedule in SCHEDULES
    for ranks in (1, 2, 3, 4, 6)
    for held in ((STAGES_PER_RANK[schedule],) if schedule in STAGES_PER_RANK else (1, 2, 3))
    for micro_batches in (*range(1, 15), 24, 31)
]


def made(schedule: str, ranks: int, held: int, micro_batches: int) -> Orders:
    return orders(runnable(schedule, ranks, held, micro_batches), ranks, held, micro_batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_is_done_once_on_the_rank_that_holds_its_stage(schedule: str) -> None:
    for _, ranks, held, micro_batches in (s for s in SETTINGS if s[0] == schedule):
        where = placement(schedule, ranks, held)
        assert sorted(stage for stages in where for stage in stages) == list(range(ranks * held))
        for actions, stages in zip(made(schedule, ranks, held, micro_batches), where, strict=True):
            pairs = Counter((stage, number) for stage in stages for number in range(micro_batches))
            assert Counter((a.stage, a.micro_batch) for a in actions if a.kind is F) == pairs
            assert Counter((a.stage, a.micro_batch) for a in actions if a.kind in (B, W)) == pairs
            assert Counter((a.stage, a.micro_batch) for a in actions if a.kind in (B, I)) == pairs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_grid_keeps_each_order_and_every_result_is_there_a_turn_before_its_use(schedule: str) -> None:
    for _, ranks, held, micro_batches in (s for s in SETTINGS if s[0] == schedule):
        order = made(schedule, ranks, held, micro_batches)
        turns = grid(order)
        assert [[action for action in row if action] for row in turns] == order
        assert len({len(row) for row in turns}) == 1
        there = {gives(action): turn for row in turns for turn, action in enumerate(row) if action}
        for row in turns:
            for turn, action in enumerate(row):
                assert not action or all(there[result] < turn for result in needs(action, ranks * held))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_adds_its_gradients_in_the_order_of_the_micro_batches(schedule: str) -> None:
    """As one process does: a floating-point sum in another order is another number."""
    for _, ranks, held, micro_batches in (s for s in SETTINGS if s[0] == schedule):
        for actions in made(schedule, ranks, held, micro_batches):
            for stage in {action.stage for action in actions}:
                added = [a.micro_batch for a in actions if a.stage == stage and a.kind in (B, W)]
                assert added == list(range(micro_batches))


def test_idle_time_follows_the_durations() -> None:
    """With nothing but forwards to pay for, gpipe's backwards are free and half the wait is gone."""
    free = {F: 1.0, B: 0.0, I: 0.0, W: 0.0}
    assert bubble(orders("gpipe", 2, 1, 4), free) == pytest.approx(1 / 5)
    slow = {F: 1.0, B: 1.0, I: 1.0, W: 3.0}
    assert bubble(orders("zbv", 4, 2, 8), slow) > bubble(orders("zbv", 4, 2, 8))


def test_placements_are_a_loop_or_a_v() -> None:
    assert placement("1f1b", 3, 1) == [[0], [1], [2]]
    assert placement("interleaved_1f1b", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    assert placement("zbv", 3, 2) == placement("dualpipev", 3, 2) == [[0, 5], [1, 4], [2, 3]]


INSTEAD = [
    # schedule, ranks, held, micro-batches  what runs
    ("1f1b", 4, 1, 3, "gpipe"),
    ("1f1b", 4, 1, 4, "1f1b"),
    ("naive", 4, 1, 1, "naive"),
    ("interleaved_1f1b", 4, 2, 3, "interleaved_1f1b"),
    ("interleaved_1f1b", 4, 2, 9, "looped_bfs"),
    ("interleaved_1f1b", 4, 2, 10, "interleaved_1f1b"),
    ("interleaved_zero_bubble", 2, 2, 5, "looped_bfs"),
    ("zbv", 4, 2, 1, "zbv"),
    ("dualpipev", 4, 2, 7, "zbv"),
    ("dualpipev", 4, 2, 8, "dualpipev"),
]


@pytest.mark.parametrize(("schedule", "ranks", "held", "micro_batches", "runs"), INSTEAD)
def test_another_schedule_takes_the_place_of_one_that_cannot_run(
    schedule: str, ranks: int, held: int, micro_batches: int, runs: str
) -> None:
    assert runnable(schedule, ranks, held, micro_batches) == runs
    assert placement(runs, ranks, held) == placement(schedule, ranks, held)
    if runs != schedule:
        with pytest.raises(ValueError, match=f"{runs} can"):
            orders(schedule, ranks, held, micro_batches)


def test_a_wrong_name_or_number_of_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule 'gpip'"):
        placement("gpip", 2, 1)
    with pytest.raises(ValueError, match="zbv takes 2 stages per rank, not 1"):
        orders("zbv", 2, 1, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_is_a_pipeline_of_forwards_under_every_placement(schedule: str) -> None:
    for _, ranks, held, micro_batches in (s for s in SETTINGS if s[0] == schedule):
        order = forward_only(placement(schedule, ranks, held), micro_batches)
        done = Counter(action for actions in order for action in actions)
        assert done == Counter(Action(F, s, n) for s in range(ranks * held) for n in range(micro_batches))
        turns = len(grid(order)[0])
        assert turns <= held * micro_batches + ranks * held - 1  # as many as a rank's work, and the way through
        if held == 1:
            assert turns == micro_batches + ranks - 1


def test_few_results_wait_in_an_evaluation_however_many_micro_batches_it_has() -> None:
    """Stage after stage would take as many turns, and keep an output of every micro-batch."""
    for schedule in ("looped_bfs", "zbv"):
        stages = placement(schedule, 4, 2)
        turns = grid(forward_only(stages, 32))
        when = {action: turn for row in turns for turn, action in enumerate(row) if action}
        used = [(turn, when.get(Action(F, a.stage + 1, a.micro_batch), turn)) for a, turn in when.items()]
        assert max(sum(given < turn <= use for given, use in used) for turn in range(len(turns[0]))) <= 8


def test_ranks_that_wait_for_each_other_are_named() -> None:
    order = [[Action(F, 0, 0), Action(B, 0, 0)], [Action(B, 1, 0), Action(F, 1, 0)]]
    with pytest.raises(ValueError, match="rank 0 before B0 at stage 0, rank 1 before B0 at stage 1"):
        grid(order)


def test_the_picture_shows_each_turn_of_each_rank() -> None:
    assert picture(grid(orders("1f1b", 2, 1, 3))).splitlines() == [
        "rank  turns 1 to 8 of 8",
        "   0  0  1  . B0  2 B1  . B2",
        "   1  .  0 B0  1 B1  2 B2  .",
        "",
        "3 forward of micro-batch 3; B3 its backward; . idle",
    ]
    assert picture(grid(orders("zbv", 2, 2, 1)), width=29).splitlines() == [
        "rank stage  turns 1 to 6 of 10",
        "   0     0  0  .  .",
        "         3     .  .  0 I0 W0",
        "   1     1  .  0     .  .",
        "         2  .     0  .  . I0",
        "",
        "rank stage  turns 7 to 10 of 10",
        "   0     0  .  . I0 W0",
        "         3  .  .",
        "   1     1    I0 W0  .",
        "         2 W0        .",
        "",
        "3 forward of micro-batch 3; I3 its backward for the inputs; W3 for the weights; . idle",
    ]


def test_the_picture_fits_the_width() -> None:
    for schedule in SCHEDULES:
        drawn = picture(grid(orders(schedule, 4, stages_per_rank(schedule), 32)), width=80)
        assert max(map(len, drawn.splitlines()[:-1])) <= 80


def test_a_plan_needs_no_torch() -> None:
    for module in (orders_module, schedule_module):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert names <= {
            "__future__",
            "collections",
            "collections.abc",
            "dataclasses",
            "enum",
            schedule_module.__name__,
        }
