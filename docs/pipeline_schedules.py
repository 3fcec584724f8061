"""The picture in docs/pipeline.md: who computes what, and when, under three schedules.

    python docs/pipeline_schedules.py docs/pipeline_schedules.png

Nothing is drawn by hand. A schedule is an order of actions for each stage; `simulate` lets every stage do its own
actions in that order, each as soon as what it needs is there. A backward takes two units of time, a forward one, and
sending takes none.
"""

import sys
from itertools import zip_longest

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

STAGES, MICRO_BATCHES = 3, 6
DURATION = {"forward": 1, "backward": 2}
COLOURS = {"forward": "#bcd6ee", "backward": "#f3b37a"}
IDLE = "#efefef"

Action = tuple[str, int]
"""Forward or backward, and the number of the micro-batch."""


def order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What a stage does, one after the other: some forwards ahead, then a backward and a forward in turn.

    The schedules differ in one number, how many forwards a stage runs ahead of its backwards.
    """
    ahead = {"naive": 1, "gpipe": micro_batches, "1f1b": min(stages - stage, micro_batches)}[schedule]
    forwards = [("forward", number) for number in range(micro_batches)]
    backwards = [("backward", number) for number in range(micro_batches)]
    turns = [action for pair in zip_longest(backwards, forwards[ahead:]) for action in pair if action is not None]
    return forwards[:ahead] + turns


def simulate(orders: list[list[Action]]) -> dict[tuple[int, Action], int]:
    """When each stage begins each of its actions. orders: of the stages, first to last."""
    last = len(orders) - 1
    begun: dict[tuple[int, Action], int] = {}
    left = [list(actions) for actions in orders]
    free = [0] * len(orders)

    def ready(stage: int, action: Action) -> int | None:
        """When what an action needs from another stage has arrived; None while that is not known."""
        kind, _ = action
        neighbour = stage - 1 if kind == "forward" else stage + 1
        if not 0 <= neighbour <= last:
            return 0  # the rows are there; a loss is its own gradient's beginning
        start = begun.get((neighbour, action))
        return None if start is None else start + DURATION[kind]

    while any(left):
        before = len(begun)
        for stage, actions in enumerate(left):
            while actions and (arrival := ready(stage, actions[0])) is not None:
                action = actions.pop(0)
                begun[stage, action] = max(free[stage], arrival)
                free[stage] = begun[stage, action] + DURATION[action[0]]
        if len(begun) == before:
            raise ValueError("every stage waits for another")
    return begun


def most_kept(actions: list[Action]) -> int:
    """The most micro-batches whose activations a stage keeps at a time: forward done, backward not."""
    kept = most = 0
    for kind, _ in actions:
        kept += 1 if kind == "forward" else -1
        most = max(most, kept)
    return most


def idle_share(begun: dict[tuple[int, Action], int], stages: int) -> float:
    """The share of the step that a stage waits, as a mean over the stages."""
    busy = sum(DURATION[kind] for _, (kind, _) in begun)
    return 1 - busy / (stages * length(begun))


def length(begun: dict[tuple[int, Action], int]) -> int:
    """When the last action ends."""
    return max(start + DURATION[kind] for (_, (kind, _)), start in begun.items())


def draw(axes: Axes, schedule: str, formula: str, expected: float) -> int:
    """One schedule's grid; returns its length. expected: the idle share by the formula, which the grid must have."""
    orders = [order(schedule, stage, STAGES, MICRO_BATCHES) for stage in range(STAGES)]
    begun = simulate(orders)
    end, idle = length(begun), idle_share(begun, STAGES)
    assert abs(idle - expected) < 1e-12, (schedule, idle, expected)
    for stage, actions in enumerate(orders):
        axes.barh(stage, end, color=IDLE, height=0.86)
        for action in actions:
            kind, number = action
            start = begun[stage, action]
            axes.barh(stage, DURATION[kind], left=start, color=COLOURS[kind], height=0.86, edgecolor="white")
            axes.text(start + DURATION[kind] / 2, stage, str(number), ha="center", va="center_baseline", fontsize=8)
        axes.text(end + 0.6, stage, f"keeps {most_kept(actions)}", va="center_baseline", fontsize=8.5, color="#444444")
    axes.set_title(f"{schedule}:  idle {idle:.0%} = {formula}", loc="left", fontsize=10.5)
    axes.set_yticks(range(STAGES), [f"rank {stage}" for stage in range(STAGES)], fontsize=9)
    axes.set_ylim(STAGES - 0.5, -0.5)
    axes.tick_params(left=False, bottom=False, labelsize=9)
    axes.spines[:].set_visible(False)
    return end


def main(out: str) -> None:
    """Draw and save."""
    p, m = STAGES, MICRO_BATCHES
    figure, grids = plt.subplots(3, 1, sharex=True, figsize=(8.4, 4.6), layout="constrained")
    bubble = (p - 1) / (m + p - 1), f"(p-1)/(m+p-1) = {p - 1}/{m + p - 1}"
    ends = [
        draw(grids[0], "naive", f"(p-1)/p = {p - 1}/{p}", (p - 1) / p),
        draw(grids[1], "gpipe", bubble[1], bubble[0]),
        draw(grids[2], "1f1b", bubble[1], bubble[0]),
    ]
    grids[-1].set_xlim(0, max(ends) + 5)
    grids[-1].set_xticks(range(0, max(ends) + 1, 6))
    grids[-1].tick_params(bottom=True)
    grids[-1].set_xlabel("time; one forward of a micro-batch is 1", fontsize=9)
    grids[1].legend(
        [*(Patch(color=colour) for colour in (*COLOURS.values(), IDLE)), Patch(visible=False)],
        ["forward of micro-batch n", "its backward, twice as long", "idle", "keeps: most micro-batches held at a time"],
        title=f"p = {p} stages, m = {m} micro-batches",
        loc="center left",
        bbox_to_anchor=(0.56, 0.5),
        alignment="left",
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
