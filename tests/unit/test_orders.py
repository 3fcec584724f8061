"""The orders of the schedules: torch's own where torch has one, and at the price that the papers name."""

from functools import cache
from typing import Any
from unittest import mock

import pytest

from shardlab.parallel.orders import STAGES_PER_RANK, orders, runnable
from shardlab.parallel.schedule import Action, Kind, Orders, bubble, most_kept

F, B, I, W = Kind  # noqa: E741


def held_under(schedule: str) -> tuple[int, ...]:
    """Numbers of stages per rank to try."""
    return (STAGES_PER_RANK[schedule],) if schedule in STAGES_PER_RANK else (1, 2, 3)


TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
LETTERS = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": I, "BACKWARD_WEIGHT": W}


def computed(action: Any) -> list[Action]:
    """torch's action as ours: its pair of overlapped ones is two, waiting and communication are none."""
    if action is None:
        return []
    if action.sub_actions:
        return [one for part in action.sub_actions for one in computed(part)]
    kind = LETTERS.get(action.computation_type.name)
    return [] if kind is None else [Action(kind, action.stage_index, action.microbatch_index)]


@cache
def stage_of_torch() -> Any:
    """A stage without a module or processes, for the orders alone."""
    from torch.distributed.pipelining import PipelineStage

    return mock.create_autospec(PipelineStage, instance=True)


def orders_of_torch(schedule: str, ranks: int, held: int, micro_batches: int) -> Orders:
    """Raises ValueError where torch refuses."""
    from torch.distributed.pipelining import schedules

    stage = stage_of_torch()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * held, None
    stages = stage if STAGES_PER_RANK.get(schedule) == 1 else [stage] * held
    order = getattr(schedules, TORCH[schedule])(stages, micro_batches).pipeline_order
    return [[one for action in order[rank] for one in computed(action)] for rank in range(ranks)]


def as_torch_has_it(schedule: str, order: Orders, micro_batches: int) -> Orders:
    """Our order with the two differences undone.

    looped_bfs: torch takes a stage's backwards from the last micro-batch to the first; ours go up, so that gradients
    are added in the same order as everywhere.
    1f1b: the last rank's forwards are numbered from 1 instead of 0 in torch's table (its loop, which doesn't use the
    table, numbers them as we do).
    """
    if schedule == "looped_bfs":
        top = micro_batches - 1
        return [[a if a.kind is F else Action(B, a.stage, top - a.micro_batch) for a in actions] for actions in order]
    if schedule == "1f1b":
        last = [Action(a.kind, a.stage, a.micro_batch + (a.kind is F)) for a in order[-1]]
        return [*order[:-1], last]
    return order


@pytest.mark.parametrize("schedule", TORCH)
def test_torch_has_the_same_orders_and_refuses_the_same_numbers(schedule: str) -> None:
    compared = 0
    for ranks in (2, 3, 4):
        for held in held_under(schedule):
            if STAGES_PER_RANK.get(schedule) is None and held == 1:
                continue  # torch wants two or more there
            for micro_batches in range(1, 14):
                if runnable(schedule, ranks, held, micro_batches) != schedule:
                    with pytest.raises(ValueError, match=r"microbatches|chunks"):
                        orders_of_torch(schedule, ranks, held, micro_batches)
                    continue
                ours = as_torch_has_it(schedule, orders(schedule, ranks, held, micro_batches), micro_batches)
                assert ours == orders_of_torch(schedule, ranks, held, micro_batches), (ranks, held, micro_batches)
                compared += 1
    assert compared >= 15


SHARES = [
    # schedule                 idle share of a step (p ranks, v stages on each, m micro-batches)
    ("naive", lambda p, v, m: (p - 1) / p),
    ("gpipe", lambda p, v, m: (p - 1) / (m + p - 1)),
    ("1f1b", lambda p, v, m: (p - 1) / (m + p - 1)),
    ("looped_bfs", lambda p, v, m: (p - 1) / (v * m + p - 1)),
    ("interleaved_1f1b", lambda p, v, m: (p - 1) / (v * m + p - 1)),
    ("interleaved_zero_bubble", lambda p, v, m: (p - 1) / (3 * v * m + p - 1)),
    ("zbv", lambda p, v, m: (p - 1) / (3 * v * m + p - 1)),
    ("dualpipev", lambda p, v, m: (p - 1) / (3 * v * m + p - 1)),
]


@pytest.mark.parametrize(("schedule", "share"), SHARES)
def test_a_rank_is_idle_for_the_papers_share_of_a_step(schedule: str, share: Any) -> None:
    """From two rounds of micro-batches on; a backward takes twice as long as a forward."""
    for ranks in (1, 2, 3, 4, 6):
        for held in held_under(schedule):
            for micro_batches in (2 * ranks, 3 * ranks, 8 * ranks):
                got = bubble(orders(schedule, ranks, held, micro_batches))
                assert got == pytest.approx(share(ranks, held, micro_batches), abs=1e-12), (ranks, held, micro_batches)


KEPT = [
    # schedule                 held  most kept at a time by rank r of p (m micro-batches), in activations of one stage
    ("naive", 1, lambda r, p, m: 1),
    ("gpipe", 1, lambda r, p, m: m),
    ("1f1b", 1, lambda r, p, m: p - r),
    ("looped_bfs", 2, lambda r, p, m: 2 * m),
    ("interleaved_1f1b", 2, lambda r, p, m: p + 2 * (p - r) - 1),
    ("interleaved_zero_bubble", 1, lambda r, p, m: p),
    ("interleaved_zero_bubble", 2, lambda r, p, m: 2 * p),
    ("zbv", 2, lambda r, p, m: 2 * p),
    ("dualpipev", 2, lambda r, p, m: 2 * p + 1),
]


@pytest.mark.parametrize(("schedule", "held", "most"), KEPT)
def test_a_rank_keeps_no_more_activations_than_the_paper_says(schedule: str, held: int, most: Any) -> None:
    for ranks in (2, 3, 4, 6):
        for micro_batches in (3 * ranks, 5 * ranks):
            got = [most_kept(actions) for actions in orders(schedule, ranks, held, micro_batches)]
            assert got == [most(rank, ranks, micro_batches) for rank in range(ranks)], (ranks, micro_batches)
