"""The picture in docs/pipeline.md: who computes what, and when, under each schedule.

    python docs/pipeline_schedules.py docs/pipeline_schedules.png

Nothing is drawn by hand: the orders are those that a run takes, and every rank does its own as soon as what it needs
is there. All schedules run one model. Of a rank's share a forward takes one unit of time and a backward two, whole or
in its two halves; where a rank has two stages each is half its share. Sending takes none.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shardlab.parallel.orders import SCHEDULES, orders, placement, stages_per_rank
from shardlab.parallel.schedule import COSTS, Kind, bubble, most_kept, starts

RANKS, MICRO_BATCHES = 3, 6
SHADES = {
    Kind.F: ("#cfe1f3", "#7fb0dc"),
    Kind.B: ("#f8cda6", "#ee9a4d"),
    Kind.I: ("#f6d9d5", "#e08e85"),
    Kind.W: ("#d6ead0", "#8cc27d"),
}
"""By kind: of a rank's first stage, and of its second."""
IDLE = "#efefef"
ROOM = 4.5
"""Units of time to the right of a grid, for what a rank keeps."""

p, m = RANKS, MICRO_BATCHES
SHARES = {
    "naive": ("(p-1)/p", (p - 1) / p),
    "gpipe": ("(p-1)/(m+p-1)", (p - 1) / (m + p - 1)),
    "1f1b": ("(p-1)/(m+p-1)", (p - 1) / (m + p - 1)),
    "looped_bfs": ("(p-1)/(2m+p-1)", (p - 1) / (2 * m + p - 1)),
    "interleaved_1f1b": ("(p-1)/(2m+p-1)", (p - 1) / (2 * m + p - 1)),
    "interleaved_zero_bubble": ("(p-1)/(6m+p-1)", (p - 1) / (6 * m + p - 1)),
    "zbv": ("(p-1)/(6m+p-1)", (p - 1) / (6 * m + p - 1)),
    "dualpipev": ("(p-1)/(6m+p-1)", (p - 1) / (6 * m + p - 1)),
}
"""The idle share by the papers' formulas, which the drawn grid must have."""


def draw(axes: Axes, schedule: str) -> float:
    """One schedule's grid; returns its length in time."""
    held = stages_per_rank(schedule)
    lasts = {kind: cost / held for kind, cost in COSTS.items()}
    order, stages = orders(schedule, RANKS, held, MICRO_BATCHES), placement(schedule, RANKS, held)
    begun = starts(order, lasts)
    end = max(start + lasts[action.kind] for action, start in begun.items())
    formula, expected = SHARES[schedule]
    assert abs(bubble(order, lasts) - expected) < 1e-12, (schedule, bubble(order, lasts), expected)
    for rank, actions in enumerate(order):
        axes.barh(rank, end, color=IDLE, height=0.86)
        for action in actions:
            start, length = begun[action], lasts[action.kind]
            colour = SHADES[action.kind][stages[rank].index(action.stage)]
            axes.barh(rank, length, left=start, color=colour, height=0.86, edgecolor="white", linewidth=0.6)
            middle = start + length / 2
            axes.text(middle, rank, str(action.micro_batch), ha="center", va="center_baseline", fontsize=8)
        kept = f"keeps {most_kept(actions) / held:g}"
        axes.text(end + 0.4, rank, kept, va="center_baseline", fontsize=9, color="#444444")
    axes.set_title(f"{schedule}:  idle {expected:.0%} = {formula}", loc="left", fontsize=10.5)
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=9)
    axes.set_ylim(RANKS - 0.5, -0.5)
    axes.tick_params(left=False, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(0, int(end) + 1, 6))
    return end


def explain(figure: Figure, axes: Axes) -> None:
    """The legend, in the place of a grid."""
    axes.axis("off")
    kinds = {
        Kind.F: "forward of micro-batch n",
        Kind.B: "its backward, twice as long",
        Kind.I: "its backward for the inputs only",
        Kind.W: "its backward for the weights",
    }
    rows = [(Patch(color=SHADES[kind][0]), text) for kind, text in kinds.items()]
    rows += [
        (Patch(color=IDLE), "idle"),
        (Patch(visible=False), "darker: at the second of a rank's two stages, each half as long"),
        (Patch(visible=False), "keeps: most micro-batches whose activations it holds at a time"),
    ]
    axes.legend(
        *zip(*rows, strict=True),
        title=f"p = {RANKS} ranks, m = {MICRO_BATCHES} micro-batches; time: one forward of a rank's share is 1",
        loc="center left",
        bbox_to_anchor=(0, 0.5),
        alignment="left",
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )


def main(out: str) -> None:
    """Draw and save: the naive schedule over the whole width, the others two in a row."""
    figure = plt.figure(figsize=(13, 8.2), layout="constrained")
    cells = figure.add_gridspec(5, 2)
    first, *others = SCHEDULES
    places = [cells[row, column] for row in range(1, 5) for column in range(2)]
    wide = figure.add_subplot(cells[0, :])
    end = draw(wide, first)
    wide.set_xlim(0, end + ROOM)
    for schedule, place in zip(others, places, strict=False):
        axes = figure.add_subplot(place)
        draw(axes, schedule)
        axes.set_xlim(0, (end + ROOM) / 2)
    explain(figure, figure.add_subplot(places[len(others)]))
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
