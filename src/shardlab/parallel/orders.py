"""The schedules of a pipeline: in which order each rank does its forwards and backwards.

Two forms give all eight. Six schedules are one walk with three numbers (`_walk`): a rank takes its forwards in a
fixed sequence and its backwards in a fixed sequence, and they differ in how many forwards it runs ahead, in how many
micro-batches go to one stage before the rank's next stage has its turn, and in whether the backward is split. The
other two (`_zbv`, `_dualpipev`) run down a V of stages and are written out phase by phase.

An order names kinds and stages only. The micro-batches are numbered afterwards, as they come (`_numbered`): at every
stage forwards and backwards go from the first micro-batch to the last, so that a stage's gradients are added in the
order in which one process adds them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from shardlab.parallel.schedule import Action, Kind, Orders

SCHEDULES = (
    "naive",
    "gpipe",
    "1f1b",
    "looped_bfs",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
STAGES_PER_RANK = {"naive": 1, "gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""Where a schedule leaves no choice; the others take any number."""

SPLIT = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that take the backward pass in two parts."""

Step = tuple[Kind, int]
"""A kind and a stage; the micro-batch is the next one there."""


def stages_per_rank(schedule: str, wanted: int = 2) -> int:
    """How many stages a rank holds under a schedule. wanted: for those that leave a choice."""
    return STAGES_PER_RANK.get(schedule, wanted)


def placement(schedule: str, ranks: int, stages_per_rank: int) -> list[list[int]]:
    """By rank: the stages that it holds, ascending.

    A loop (stage s is held by rank s % ranks), or a V, down the ranks and up again: rank r holds r and 2·ranks-1-r,
    so that the first rank also has the end of the pipeline.
    """
    _check(schedule, stages_per_rank)
    if schedule in ("zbv", "dualpipev"):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks)]


def runnable(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> str:
    """The schedule itself, or the one that takes its place at this number of micro-batches, with the same placement.

    1f1b needs as many micro-batches as ranks, dualpipev as many as stages, and the interleaved ones a number that is
    cut into equal rounds of about one micro-batch per rank.
    """
    _check(schedule, stages_per_rank)
    match schedule:
        case "1f1b" if micro_batches < ranks:
            return "gpipe"
        case "interleaved_1f1b" | "interleaved_zero_bubble" if micro_batches % _rounds(ranks, micro_batches):
            return "looped_bfs"
        case "dualpipev" if micro_batches < 2 * ranks:
            return "zbv"
    return schedule


def orders(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """By rank: its actions in order.

    Raises ValueError if the schedule can't run so; `runnable` names one that can.
    """
    if (other := runnable(schedule, ranks, stages_per_rank, micro_batches)) != schedule:
        raise ValueError(f"{schedule} can't run with {micro_batches} micro-batches on {ranks} ranks; {other} can")
    return [
        _numbered(_steps(schedule, rank, ranks, stages_per_rank, micro_batches), micro_batches) for rank in range(ranks)
    ]


def forward_only(placement: list[list[int]], micro_batches: int) -> Orders:
    """By rank: the forwards of an evaluation, pipelined under any placement.

    A forward has the number micro-batch + stage, that of what it waits for is one less, and every rank goes by that
    number: nobody waits for something that a rank puts after what waits for it. However many micro-batches there are,
    only about one output for each stage waits for its use.
    """
    return [
        [
            Action(Kind.F, stage, number)
            for _, stage, number in sorted((n + stage, stage, n) for stage in stages for n in range(micro_batches))
        ]
        for stages in placement
    ]


def _check(schedule: str, stages_per_rank: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    fixed = STAGES_PER_RANK.get(schedule)
    if stages_per_rank < 1 or fixed not in (None, stages_per_rank):
        raise ValueError(f"{schedule} takes {fixed or '1 or more'} stages per rank, not {stages_per_rank}")


def _rounds(ranks: int, micro_batches: int) -> int:
    """Into how many rounds the interleaved schedules cut a step's micro-batches."""
    return max(1, micro_batches // ranks)


def _numbered(steps: Iterable[Step], micro_batches: int) -> list[Action]:
    """Actions from steps: at each stage the micro-batches come in ascending order, in forwards and in backwards.

    Steps that are for micro-batches beyond the last are left out: a schedule that needs a certain number of them is
    made for that number, and what is left of it still has every result before its use.
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    split: defaultdict[int, deque[int]] = defaultdict(deque)
    actions = []
    for kind, stage in steps:
        if kind is Kind.W:
            number = split[stage].popleft()
        else:
            count = forwards if kind is Kind.F else backwards
            number = count[stage]
            count[stage] += 1
        if kind is Kind.I:
            split[stage].append(number)
        if number < micro_batches:
            actions.append(Action(kind, stage, number))
    return actions


def _steps(schedule: str, rank: int, ranks: int, held: int, micro_batches: int) -> Iterator[Step]:
    """A rank's steps. held: stages per rank.

    naive: each micro-batch to the end and back before the next.
    gpipe: all forwards, then all backwards. Huang et al. 2019, GPipe.
    1f1b: as many forwards ahead as there are ranks behind, then one backward after each forward, so that a rank
    keeps at most `ranks` micro-batches. Narayanan et al. 2019, PipeDream; its flushing form, Narayanan et al. 2021.
    looped_bfs: gpipe with several stages a rank, all micro-batches at one stage before the next. Lamy-Poirier 2022,
    Breadth-First Pipeline Parallelism. Backwards go in ascending order here too.
    interleaved_1f1b: 1f1b with several stages a rank, a round of micro-batches at one stage before the next, and two
    more forwards ahead for each rank behind. Narayanan et al. 2021, Efficient Large-Scale Language Model Training,
    section 2.2; rounds that are longer than `ranks` serve numbers that `ranks` doesn't divide.
    interleaved_zero_bubble: the same with the backward split: nobody waits for the weights' part, so one forward
    ahead for each rank behind is enough, and rank r does that part r backwards later, when it would wait else. With
    one stage a rank this is ZB-H1 of Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.
    """
    behind, work = ranks - 1 - rank, held * micro_batches
    group = micro_batches // _rounds(ranks, micro_batches)
    match schedule:
        case "naive":
            return _walk(rank, ranks, held, micro_batches, micro_batches, 0)
        case "gpipe" | "looped_bfs":
            return _walk(rank, ranks, held, micro_batches, micro_batches, work)
        case "1f1b":
            return _walk(rank, ranks, held, micro_batches, micro_batches, behind)
        case "interleaved_1f1b":
            return _walk(rank, ranks, held, micro_batches, group, (held - 1) * group + 2 * behind)
        case "interleaved_zero_bubble":
            return _walk(rank, ranks, held, micro_batches, group, (held - 1) * group + behind, weights_later=rank)
        case "zbv":
            return _zbv(rank, ranks, micro_batches)
        case _:
            return _dualpipev(rank, ranks, micro_batches)


def _walk(
    rank: int, ranks: int, held: int, micro_batches: int, group: int, ahead: int, weights_later: int | None = None
) -> Iterator[Step]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left.

    group: micro-batches that go to one of the rank's stages before the next stage has its turn; forwards take the
    stages upwards, backwards downwards
    ahead: forwards before the first pair
    weights_later: split the backward, and do the weights' part after so many further backwards; None: whole ones
    """
    work = held * micro_batches
    upwards = [rank + ranks * (step // group % held) for step in range(work)]
    downwards = [rank + ranks * (held - 1 - step // group % held) for step in range(work)]
    ahead = min(ahead, work)
    for stage in upwards[:ahead]:
        yield Kind.F, stage
    for step, stage in enumerate(downwards):
        if ahead + step < work:
            yield Kind.F, upwards[ahead + step]
        if weights_later is None:
            yield Kind.B, stage
        else:
            yield Kind.I, stage
            if step >= weights_later:
                yield Kind.W, downwards[step - weights_later]
    if weights_later is not None:
        for stage in downwards[max(0, work - weights_later) :]:
            yield Kind.W, stage


def _zbv(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    """ZB-V: two stages a rank on a V, with the backward split.

    Where kinds and stages take equally long, no rank waits between its first action and its last, and it keeps what
    1f1b's first rank keeps. Made for 2·ranks-1 micro-batches at least. Source: Qi et al. 2024, Pipeline Parallelism
    with Controllable Memory.
    """
    out, back = rank, 2 * ranks - 1 - rank
    count, behind = max(micro_batches, 2 * ranks - 1), ranks - 1 - rank
    yield from [(Kind.F, out)] * (2 * behind + 1)
    yield from [(Kind.F, back), (Kind.F, out)] * rank
    yield from [(Kind.F, back), (Kind.I, back), (Kind.W, back)] * (behind + 1)
    for step in range(count - ranks):
        if step < count - ranks - behind:
            yield Kind.F, out
        yield from [(Kind.I, out), (Kind.W, out), (Kind.F, back), (Kind.I, back), (Kind.W, back)]
    yield from [(Kind.I, out), (Kind.I, back)] * rank
    yield from [(Kind.I, out), (Kind.W, out)] * (behind + 1)
    yield from [(Kind.W, back)] * rank
    yield from [(Kind.W, out)] * rank


def _dualpipev(rank: int, ranks: int, micro_batches: int) -> Iterator[Step]:
    """DualPipeV: on the same V, a forward at one of a rank's stages next to a backward at the other.

    Such a pair is of two micro-batches, so it could be overlapped (here one follows the other). Backwards are whole in
    the middle of a step, and split at its ends, where that fills a gap. Sources: DeepSeek-AI 2024, DeepSeek-V3
    Technical Report (DualPipe, which keeps two copies of the parameters); Qi et al. 2025, DualPipe Could Be Better
    Without the Dual (its half, with one).
    """
    out, back = rank, 2 * ranks - 1 - rank
    behind = ranks - 1 - rank
    yield from [(Kind.F, out)] * (2 * behind)
    yield from [(Kind.F, out), (Kind.F, back)] * (rank + 1)
    yield from [(Kind.I, back), (Kind.W, back), (Kind.F, back)] * behind
    middle = [(Kind.F, out), (Kind.B, back), (Kind.F, back), (Kind.B, out)]
    yield from middle * (micro_batches - ranks - behind)
    yield from [(Kind.B, back), (Kind.F, back), (Kind.B, out)] * behind
    last = [back, out] * (rank + 1)
    yield from [(Kind.B, stage) for stage in last[: rank + 1]]
    yield from [(Kind.I, stage) for stage in last[rank + 1 :]]
    waiting = last[rank + 1 :] + [out] * behind  # for their weights' part, first in first out
    for stage in waiting[:behind]:
        yield from [(Kind.W, stage), (Kind.I, out)]
    yield from [(Kind.W, stage) for stage in waiting[behind:]]
