"""What a pipeline's ranks do, and in which turn: actions, the grid of turns, and what can be read off it.

A schedule is an order of actions for each rank, nothing more (orders.py makes them). `starts` lets every rank do its
own actions in that order, each as soon as what it needs is there, and everything else follows from it: the grid of
turns that the executor walks through, the idle share, the picture. What is printed is therefore what runs.

Pure Python, without torch, so that a plan is printed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is computed for a micro-batch at a stage.

    A backward is done whole, or in two parts that may lie apart: what the stage before waits for, and what nobody
    waits for. Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, where they are called B and W.
    """

    F = "forward"
    B = "whole backward"
    I = "backward for the inputs"  # noqa: E741, the paper's letters leave no better one
    W = "backward for the weights"


@dataclass(frozen=True)
class Action:
    """One unit of a rank's work.

    stage: number in the whole pipeline, 0..S-1
    micro_batch: 0..m-1, among those of this data rank
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.name}{self.micro_batch} at stage {self.stage}"


Result = tuple[Kind, int, int]
"""What an action gives: kind, stage, micro-batch. Gradients for the inputs are (I, ...), from a B as from an I."""

Orders = list[list[Action]]
"""By rank: what it does, one after the other."""

Grid = list[list[Action | None]]
"""By rank, by turn: what it does in that turn; all ranks have the same number of turns."""

ONE_TURN: Mapping[Kind, float] = dict.fromkeys(Kind, 1)
COSTS: Mapping[Kind, float] = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""Durations of a layer of matrix products: each of its three products takes as long as the others."""


def gives(action: Action) -> Result:
    """The result of an action. A B also gives the weights' gradient, which no action waits for."""
    return Kind.I if action.kind is Kind.B else action.kind, action.stage, action.micro_batch


def needs(action: Action, stages: int) -> list[Result]:
    """The results that an action waits for, in a pipeline of so many stages."""
    stage, number = action.stage, action.micro_batch
    match action.kind:
        case Kind.F:
            return [(Kind.F, stage - 1, number)] if stage > 0 else []
        case Kind.W:
            return [(Kind.I, stage, number)]
        case Kind.B | Kind.I:
            own = (Kind.F, stage, number)
            return [own, (Kind.I, stage + 1, number)] if stage < stages - 1 else [own]


def starts(orders: Orders, durations: Mapping[Kind, float] = COSTS) -> dict[Action, float]:
    """When each action begins if sending takes no time and every rank waits only for what it needs.

    Raises ValueError if the orders make ranks wait for each other for ever.
    """
    stages = 1 + max(action.stage for actions in orders for action in actions)
    begun: dict[Action, float] = {}
    there: dict[Result, float] = {}
    free = [0.0] * len(orders)
    done = [0] * len(orders)
    while left := [rank for rank, actions in enumerate(orders) if done[rank] < len(actions)]:
        before = len(begun)
        for rank in left:
            actions = orders[rank]
            while done[rank] < len(actions):
                action = actions[done[rank]]
                needed = needs(action, stages)
                if any(result not in there for result in needed):
                    break
                begun[action] = max([free[rank], *(there[result] for result in needed)])
                free[rank] = there[gives(action)] = begun[action] + durations[action.kind]
                done[rank] += 1
        if len(begun) == before:
            stuck = ", ".join(f"rank {rank} before {orders[rank][done[rank]]}" for rank in left)
            raise ValueError(f"the ranks wait for each other for ever: {stuck}")
    return begun


def grid(orders: Orders) -> Grid:
    """The turns in which the actions are done: one turn each, as early as the order of each rank allows.

    What an action gives can be used from the next turn on. Raises ValueError on a deadlock.
    """
    begun = {action: int(start) for action, start in starts(orders, ONE_TURN).items()}
    turns = 1 + max(begun.values())
    rows: Grid = [[None] * turns for _ in orders]
    for row, actions in zip(rows, orders, strict=True):
        for action in actions:
            row[begun[action]] = action
    return rows


def bubble(orders: Orders, durations: Mapping[Kind, float] = COSTS) -> float:
    """The share of a step that a rank waits, as a mean over the ranks, 0..1; transfers take no time."""
    begun = starts(orders, durations)
    busy = sum(durations[action.kind] for action in begun)
    end = max(start + durations[action.kind] for action, start in begun.items())
    return 1 - busy / (len(orders) * end)


def most_kept(actions: Sequence[Action]) -> int:
    """The most activations that are kept at a time while a rank does these actions in turn.

    Counted in (stage, micro-batch) pairs, from the forward to the whole backward or the one for the weights (the one
    for the inputs frees some of them already, which is not counted). Give it a rank's order for the rank as a whole.
    """
    kept = most = 0
    for action in actions:
        if action.kind is Kind.F:
            kept += 1
        elif action.kind is not Kind.I:
            kept -= 1
        most = max(most, kept)
    return most


def picture(grid: Grid, width: int = 100) -> str:
    """The grid of turns in characters: ranks down, time across, cut into bands that fit the width.

    A rank with several stages has a line for each, so that a cell holds only a kind and the number of a micro-batch,
    forwards the bare number. A dot is a turn in which the rank does nothing, on all of its lines.
    """
    done = [action for row in grid for action in row if action]
    held = [sorted({action.stage for action in row if action}) for row in grid]
    several = any(len(stages) > 1 for stages in held)
    digits = len(str(max(action.micro_batch for action in done)))
    columns = max(1, (width - (10 if several else 4)) // (digits + 2))

    def cell(action: Action | None, stage: int) -> str:
        if action is None:
            return "."
        if action.stage != stage:
            return ""
        return f"{'' if action.kind is Kind.F else action.kind.name}{action.micro_batch}"

    lines = []
    for begin in range(0, len(grid[0]), columns):
        end = min(begin + columns, len(grid[0]))
        lines.append(f"rank {'stage ' if several else ''} turns {begin + 1} to {end} of {len(grid[0])}")
        for rank, (row, stages) in enumerate(zip(grid, held, strict=True)):
            for stage in stages:
                name = f"{rank if stage == stages[0] else '':>4}" + (f"{stage:>6}" if several else "")
                cells = (f"{cell(action, stage):>{digits + 2}}" for action in row[begin:end])
                lines.append((name + "".join(cells)).rstrip())
        lines.append("")
    meanings = {Kind.B: "B3 its backward", Kind.I: "I3 its backward for the inputs", Kind.W: "W3 for the weights"}
    kinds = {action.kind for action in done}
    legend = ["3 forward of micro-batch 3", *(text for kind, text in meanings.items() if kind in kinds), ". idle"]
    return "\n".join([*lines, "; ".join(legend)])
