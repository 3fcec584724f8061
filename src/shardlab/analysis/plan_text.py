"""A plan as text for a terminal of 100 columns: plain, aligned, equal ranks in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardlab.analysis.candidates import Candidate
from shardlab.analysis.plan import Plan, RankPlan
from shardlab.analysis.work import Work
from shardlab.config.schema import AXES, ShardLevel
from shardlab.parallel.mesh import ZERO
from shardlab.parallel.schedule import grid, picture

KIB, MIB, GIB = 2**10, 2**20, 2**30

KINDS = ("parameters", "gradients", "optimizer", "activations")
"""Of memory, as fields of Memory."""

MOST_TURNS = 132
"""Of a schedule's picture: six bands, with two digits a micro-batch."""


def plan_text(plan: Plan, every_shape: bool = False) -> str:
    """All of a plan. every_shape: list each parameter, instead of one line for each kind"""
    blocks = [_head(plan), _step(plan), _memory(plan), _traffic(plan), _shapes(plan, every_shape)]
    if plan.work.mesh.pipeline > 1:
        blocks.append(_schedule(plan))
    return "\n\n".join("\n".join(block) for block in blocks)


def candidates_text(candidates: list[Candidate]) -> str:
    """Candidates side by side, each by its worst rank; a refused one with its reason."""
    memory = next((c.plan.config.plan.memory_gib for c in candidates if isinstance(c.plan, Plan)), None)
    title = [] if memory is None else [f"in {memory:g} GiB"]
    rows, refused = [["", "ranks", *KINDS, "sum", "sent", "bubble", *title]], {}
    for candidate in candidates:
        plan = candidate.plan
        name = candidate.what.replace("strategy=", "", 1) or (plan if isinstance(plan, str) else plan.name)
        if isinstance(plan, str):
            refused[len(rows)] = f"refused: {plan}"
            rows.append([name])
            continue
        worst = plan.worst
        sent = size(max(rank.sent_bytes for rank in plan.ranks))
        idle = f"{plan.idle:.1%}" if plan.work.mesh.pipeline > 1 else "-"
        fits = [] if memory is None else [fit(plan, worst)]
        rows.append([name, str(len(plan.ranks)), *memory_cells(worst), sent, idle, *fits])
    lines = table(rows)
    for place, reason in refused.items():
        lines[place] = f"{rows[place][0]:<{max(len(row[0]) for row in rows)}}  {reason}"
    lines.append("")
    lines.append(
        "Memory of the rank that needs most: the peak within a step, without what torch and Python need themselves"
    )
    lines.append("(about 0.3 GiB); activations are an estimate. Sent: by the busiest rank in a step.")
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes in the unit that fits: '0', '812 B', '1.2 MiB'."""
    if count == 0:
        return "0"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}" if abs(count) < 100 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


def table(rows: list[list[str]], left: int = 1) -> list[str]:
    """Aligned columns, two spaces apart. left: so many columns are flush left, the others flush right"""
    columns = max(len(row) for row in rows)
    filled = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in filled) for column in range(columns)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in filled
    ]


def numbers(values: Iterable[int]) -> str:
    """Numbers with runs in short: '0-3,6'."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def places(work: Work, places: range) -> str:
    """Some places in words: 'embedding, layers 0-5'."""
    layers = [place for place in places if 0 <= place < work.shape.n_layers]
    words = ["embedding"] if -1 in places else []
    if layers:
        words.append(f"layer{'s' * (len(layers) > 1)} {numbers(layers)}")
    if work.shape.n_layers in places:
        words.append("head" if work.shape.norm.name == "post" else "norm and head")
    return ", ".join(words)


def memory_cells(rank: RankPlan) -> list[str]:
    """A rank's memory by kind, and the sum."""
    return [*(size(getattr(rank.memory, kind)) for kind in KINDS), size(rank.memory.total)]


def fit(plan: Plan, rank: RankPlan) -> str:
    """Whether a rank fits, and by how much."""
    room = plan.room(rank)
    if room is None:
        return ""
    return f"fits, {size(room)} free" if room >= 0 else f"no, {size(-room)} over"


def _head(plan: Plan) -> list[str]:
    config, work = plan.config, plan.work
    task = f"{plan.meta.vocab_size:,} words" + (f", {plan.meta.n_classes} classes" if plan.meta.n_classes else "")
    sizes = " x ".join(f"{axis} {work.mesh.size(axis)}" for axis in AXES)
    level = f", ZeRO {ZERO[config.strategy.shard_level]}" if work.mesh.shard > 1 else ""
    return [
        f"model={config.model.name}  {work.table.elements:,} parameters, {work.shape.n_layers} layers",
        f"dataset={config.dataset.name}  {task}, rows of up to {work.shape.max_len}",
        f"optimizer={config.optimizer.name}  precision={config.precision.name.name}",
        f"mesh={plan.name}  {sizes} = {work.mesh.ranks} rank{'s' * (work.mesh.ranks > 1)}{level}",
    ]


def _step(plan: Plan) -> list[str]:
    cut, copies = plan.work.cut, plan.work.mesh.data_ranks
    padding = f", {cut.padding} of them padding" if cut.padding else ""
    each = f"; {cut.each} for each of {copies} data ranks" if copies > 1 else ""
    rows = f"row{'s' * (cut.rows > 1)}"
    return [
        f"A step of {plan.config.trainer.global_batch} rows is {cut.count} micro-batch{'es' * (cut.count > 1)} of "
        f"{cut.rows} {rows}{padding}{each}."
    ]


def _memory(plan: Plan) -> list[str]:
    asked = plan.config.plan.memory_gib
    title = [] if asked is None else [f"in {asked:g} GiB"]
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in plan.ranks:
        held = " | ".join(places(plan.work, each) for each in rank.stages)
        cells = (held, f"{rank.elements:,}", *memory_cells(rank), *([] if asked is None else [fit(plan, rank)]))
        rows.setdefault(cells, []).append(rank.rank)
    header = ["rank", "holds", "elements", *KINDS, "sum", *title]
    lines = table([header, *([numbers(ranks), *cells] for cells, ranks in rows.items())], left=2)
    return ["Memory of a rank", *lines]


def _traffic(plan: Plan) -> list[str]:
    if len(plan.ranks) == 1:
        return ["Nothing is sent."]
    kinds = sorted({(axis, kind) for rank in plan.ranks for axis, each in rank.sent.items() for kind in each})
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in plan.ranks:
        cells = (
            *(size(rank.sent[axis][kind] if axis in rank.sent else 0) for axis, kind in kinds),
            size(rank.sent_bytes),
        )
        rows.setdefault(cells, []).append(rank.rank)
    header = [["", *(axis for axis, _ in kinds)], ["rank", *(kind for _, kind in kinds), "sum"]]
    lines = table([*header, *([numbers(ranks), *cells] for cells, ranks in rows.items())])
    return ["Sent by a rank in a step", *lines]


def _shapes(plan: Plan, every: bool) -> list[str]:
    rows: dict[tuple[str, ...], list[int]] = {}
    counts: dict[tuple[str, ...], int] = {}
    for held in plan.shapes:
        name = held.entry.name if every else re.sub(r"\.\d+\.", ".*.", held.entry.name)
        cells = (name, str(list(held.entry.shape)), str(list(held.shape)))
        rows.setdefault(cells, []).extend(held.ranks)
        counts[cells] = counts.get(cells, 0) + 1
    lines = table(
        [
            ["parameter", "whole", "held", "", "ranks"],
            *(
                [*cells, f"x {counts[cells]}" if counts[cells] > 1 else "", numbers(set(ranks))]
                for cells, ranks in rows.items()
            ),
        ],
        left=3,
    )
    if plan.work.mesh.shard > 1:
        level, of = plan.config.strategy.shard_level, plan.work.mesh.shard
        kept = {
            ShardLevel.optimizer: "optimizer state",
            ShardLevel.gradients: "summed gradients and optimizer state",
            ShardLevel.parameters: "parameters, summed gradients and optimizer state",
        }[level]
        lines.append(f"ZeRO {ZERO[level]}: of {kept}, a rank keeps 1/{of} of each place.")
    return lines


def _schedule(plan: Plan) -> list[str]:
    work = plan.work
    ranks, count = work.mesh.pipeline, work.cut.each
    formula = {
        "naive": f"(p-1)/p, p={ranks} ranks",
        "gpipe": f"(p-1)/(m+p-1), p={ranks} ranks, m={count} micro-batches",
        "1f1b": f"(p-1)/(m+p-1), p={ranks} ranks, m={count} micro-batches",
    }.get(work.schedule, "read off the order below, a backward taking twice as long as a forward")
    turns = grid(work.orders)
    lines = [f"Schedule {work.schedule}: ideal bubble {plan.idle:.1%}, {formula}", ""]
    if len(turns[0]) > MOST_TURNS:
        lines.append(f"The first {MOST_TURNS} of {len(turns[0])} turns:")
    return [*lines, picture([row[:MOST_TURNS] for row in turns])]
