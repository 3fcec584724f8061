"""A pipeline's transfers: what one rank sends in a turn, the other one begins to receive in the same turn."""

from collections import Counter, defaultdict

import pytest

from shardlab.parallel.orders import SCHEDULES, STAGES_PER_RANK, forward_only, orders, placement, runnable
from shardlab.parallel.pipeline import Message, Turn, turns
from shardlab.parallel.schedule import Action, Kind, Orders


def sizes(schedule: str) -> list[tuple[int, int, int]]:
    """Ranks, stages a rank, micro-batches."""
    held = (STAGES_PER_RANK[schedule],) if schedule in STAGES_PER_RANK else (1, 2, 3)
    return [(p, v, m) for p in (2, 3, 4) for v in held for m in (1, 2, 3, 4, 5, 8, 11)]


def rows_of(schedule: str, ranks: int, held: int, micro_batches: int, train: bool) -> Orders:
    if not train:
        return forward_only(placement(schedule, ranks, held), micro_batches)
    return orders(runnable(schedule, ranks, held, micro_batches), ranks, held, micro_batches)


def needed(action: Action, stages: int) -> Message | None:
    """What an action takes from another stage."""
    if action.kind is Kind.F and action.stage > 0:
        return Message(Kind.F, action.stage - 1, action.micro_batch)
    if action.kind in (Kind.B, Kind.I) and action.stage < stages - 1:
        return Message(Kind.I, action.stage + 1, action.micro_batch)
    return None


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transfers_match_on_both_ends_and_come_before_they_are_needed(schedule, train):
    for ranks, held, micro_batches in sizes(schedule):
        where = placement(schedule, ranks, held)
        rows = rows_of(schedule, ranks, held, micro_batches, train)
        ways = [turns(rows, where, rank) for rank in range(ranks)]
        check_ends(ways)
        for way, actions, own in zip(ways, rows, where, strict=True):
            assert [turn.action for turn in way if turn.action] == actions
            check_way(way, own, ranks * held)


def check_ends(ways: list[list[Turn]]) -> None:
    """What is sent is received in the same turn, and in the same order between two ranks."""
    for together in zip(*ways, strict=True):
        sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        received: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
        for rank, turn in enumerate(together):
            for message, peer in turn.sends:
                sent[rank, peer].append(message)
            for message, peer in turn.receives:
                received[peer, rank].append(message)
        assert sent == received
        assert all(a != b for a, b in sent)


def check_way(way: list[Turn], own: list[int], stages: int) -> None:
    """A rank gets all that it needs before it needs it, sends what it has made, once, and nothing else."""
    here: Counter[Message] = Counter()
    made: Counter[Message] = Counter()
    for turn in way:
        if turn.action is not None:
            want = needed(turn.action, stages)
            if want is not None and want.stage not in own:
                assert here[want] == 1, f"{turn.action} before it has come"
                here[want] -= 1
            kind = {Kind.F: Kind.F, Kind.B: Kind.I, Kind.I: Kind.I}.get(turn.action.kind)
            if kind is not None:
                made[Message(kind, turn.action.stage, turn.action.micro_batch)] += 1
        for message, _ in turn.sends:
            assert made[message] == 1, "made before, and not sent yet"
            made[message] -= 1
        here.update(message for message, _ in turn.receives)
    assert not +here, "nothing came in vain"
    left = {message for message in +made if 0 <= message.to < stages and message.to not in own}
    assert not left, "nothing for another rank is left here"
