"""The picture in docs/tensor.md: one block of the `small` model on two tensor ranks.

    python docs/tensor_split.py docs/tensor_split.png

Shapes and colours come from the model's own table and from what each rank's Part holds of it: a matrix is painted
element by element with the rank that has it.
"""

import math
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle

from shardlab.config.compose import compose
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape, shape_of
from shardlab.parallel.part import Part
from shardlab.parallel.table import Entry, ParameterTable
from shardlab.parallel.tensor import TensorAxis

RANKS, LAYER = 2, 0
COLOURS = ["#4c8fcc", "#e8913f"]
ABSENT, WHOLE, LINE = "#f1f1f1", "#dcdcdc", "#555555"
F, G = r"$\mathbf{f}$   backward: all-reduce", r"$\mathbf{g}$   forward: all-reduce"
INCH = 0.36 / 256
"""Inches a feature of a matrix; the panels' coordinates are inches too, with y downwards."""

HEIGHTS = [2.45, 4.05]
"""Inches of the panels."""


class Flow:
    """A panel, filled from left to right: a lane for each rank, and what lies across both.

    lane: inches between the lanes
    """

    def __init__(self, axes: Axes, table: ParameterTable, parts: list[Part], lane: float) -> None:
        self.axes, self.table, self.parts = axes, table, parts
        self.lanes = [lane * rank for rank in range(len(parts))]
        self.x = 0.0

    def arrow(self, width: float, text: str = "", below: str = "", *, split: bool = False) -> None:
        """What goes on to the right; split: it is the rank's own, else every rank has the same."""
        for y, own in zip(self.lanes, COLOURS, strict=True):
            style = {"arrowstyle": "-|>", "color": own if split else LINE, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
            self.axes.annotate("", (self.x + width - 0.03, y), (self.x + 0.03, y), arrowprops=style)
            self.axes.text(self.x + width / 2 - 0.02, y - 0.07, text, ha="center", va="bottom", fontsize=8)
            self.axes.text(self.x + width / 2 - 0.02, y + 0.06, below, ha="center", va="top", fontsize=8)
        self.x += width

    def across(self, width: float, text: str, colour: str) -> None:
        """A box over both lanes."""
        top, bottom = self.lanes[0] - 0.34, self.lanes[-1] + 0.34
        box = FancyBboxPatch(
            (self.x + 0.04, top + 0.04),
            width - 0.08,
            bottom - top - 0.08,
            boxstyle="round,pad=0.04",
            facecolor=colour,
            edgecolor=LINE,
            linewidth=0.8,
        )
        self.axes.add_patch(box)
        place = self.x + width / 2, (top + bottom) / 2
        self.axes.text(*place, text, ha="center", va="center", rotation=90, fontsize=8.5, linespacing=1.5)
        self.x += width

    def weights(self, name: str, how: str) -> None:
        """A matrix as the paper multiplies, x A: inputs downwards, outputs across. The rank's own slice is coloured."""
        entry = self.table[f"layers.{LAYER}.{name}.weight"]
        bias = self.table[f"layers.{LAYER}.{name}.bias"]
        holder = as_multiplied(owners(entry, self.parts), bias)
        height, width = holder.shape[0] * INCH, holder.shape[1] * INCH
        for rank, y in enumerate(self.lanes):
            picture = np.where((holder == rank)[..., None], to_rgb(COLOURS[rank]), to_rgb(ABSENT))
            top = y - height / 2
            self.axes.imshow(picture, extent=(self.x, self.x + width, top + height, top), interpolation="nearest")
            self.axes.add_patch(Rectangle((self.x, top), width, height, fill=False, edgecolor=LINE, linewidth=0.8))
            part = self.parts[rank]
            whole = "" if part.shape(bias) != bias.shape else " (whole)"
            held = f"holds {list(part.shape(entry))}\nbias {list(part.shape(bias))}{whole}"
            self.axes.text(self.x + width / 2, top + height + 0.05, held, ha="center", va="top", fontsize=8)
        top = self.lanes[0] - height / 2
        title = f"{name}  {list(entry.shape)}\n{how}"
        self.axes.text(self.x + width / 2, top - 0.06, title, ha="center", va="bottom", fontsize=8.5)
        self.x += width

    def work(self, width: float, texts: list[str]) -> None:
        """What each rank computes alone, without weights."""
        for y, text, colour in zip(self.lanes, texts, COLOURS, strict=True):
            self.axes.text(self.x + width / 2, y, text, ha="center", va="center", fontsize=8.5, color=colour)
        self.x += width


def owners(entry: Entry, parts: list[Part]) -> np.ndarray:
    """The rank that holds each element of a whole parameter."""
    held_by = np.full(entry.shape, -1)
    for rank, part in enumerate(parts):
        assert (held_by[part.index(entry)] == -1).all(), f"{entry.name}: held twice"
        held_by[part.index(entry)] = rank
    return held_by


def as_multiplied(weight: np.ndarray, bias: Entry) -> np.ndarray:
    """[inputs, outputs] of a weight that is stored as [outputs..., inputs...]; a bias has a value for each output."""
    return weight.reshape(bias.elements, -1).T


def attention(flow: Flow, shape: Shape) -> None:
    """The block's first half."""
    here = shape.n_heads // RANKS
    heads = [", ".join(str(rank * here + head) for head in range(here)) for rank in range(RANKS)]
    flow.arrow(1.02, f"[rows, seq, {shape.d_model}]")
    flow.across(0.32, F, "white")
    flow.arrow(0.46)
    flow.weights("attention.qkv", "by columns: heads of q, k, v")
    flow.arrow(0.25, split=True)
    flow.work(0.8, [f"attention\nof heads\n{names}" for names in heads])
    flow.arrow(1.02, f"[rows, seq, {here * shape.d_head}]", split=True)
    flow.weights("attention.out", "by rows: heads")


def feed_forward(flow: Flow, shape: Shape) -> None:
    """The block's second half."""
    flow.arrow(1.02, f"[rows, seq, {shape.d_model}]")
    flow.across(0.32, F, "white")
    flow.arrow(0.46)
    flow.weights("feed_forward.up", "by columns: features")
    flow.arrow(0.25, split=True)
    flow.work(0.55, [f"{shape.activation.name},\ndropout"] * RANKS)
    flow.arrow(1.02, f"[rows, seq, {shape.d_ff // RANKS}]", split=True)
    flow.weights("feed_forward.down", "by rows: features")


def close(flow: Flow, shape: Shape) -> None:
    """What ends both halves: the sum, and what every rank does in full."""
    flow.arrow(1.02, f"[rows, seq, {shape.d_model}]", "a summand", split=True)
    flow.across(0.32, G, "white")
    flow.arrow(0.25)
    flow.across(0.5, "+ bias, dropout\n+ x, LayerNorm", WHOLE)
    flow.arrow(0.35)


def main(out: str) -> None:
    """Draw and save."""
    config = compose(["model=small"]).config
    shape = shape_of(config.model, vocab_size=2, classes=0, max_len=1)  # neither matters within a block
    table = parameter_table(shape)
    parts = [Part(range(LAYER, LAYER + 1), TensorAxis(None, rank, RANKS)) for rank in range(RANKS)]
    entries = [entry for entry in table if entry.layer in parts[0].layers]
    held = sum(math.prod(parts[0].shape(entry)) for entry in entries)

    figure, panels = plt.subplots(2, 1, figsize=(8.2, 6.7), height_ratios=HEIGHTS, layout="constrained")
    for axes, lane, height, half in zip(panels, (1.05, 2.0), HEIGHTS, (attention, feed_forward), strict=True):
        flow = Flow(axes, table, parts, lane)
        half(flow, shape)
        close(flow, shape)
        axes.set_xlim(0, 7.95)
        axes.set_ylim((lane + height) / 2, (lane - height) / 2)
        axes.set_axis_off()
        for rank, y in enumerate(flow.lanes):
            axes.text(0.02, y - 0.3, f"rank {rank}", color=COLOURS[rank], weight="bold", fontsize=9)
    note = (
        "f passes forward as it is and sums backward, g sums forward and passes backward as it is. Grey: whole on both "
        f"ranks.\nEach rank holds {held:,} of the block's {sum(e.elements for e in entries):,} elements: half of each "
        "matrix, and all of the norms and of the biases after g."
    )
    figure.supxlabel(note, fontsize=8.5, x=0.02, ha="left")
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
