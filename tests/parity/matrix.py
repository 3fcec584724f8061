"""The parity matrix: which mixes of options are held against one process. The table is matrix.csv, one case a row.

Every pair of values of two different factors is in some row, unless the pair can't be asked for; `impossible` says
why. Most faults of a mix show in a pair (a schedule with a level of ZeRO, a tied weight with sequence parallelism), and
a table of all pairs has about a hundred rows where the full product has millions. `python matrix.py` writes it anew.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

from shardlab.parallel.orders import STAGES_PER_RANK, runnable

TABLE = Path(__file__).with_name("matrix.csv")
NONE = "-"
"""A factor that has no meaning in a row: the mesh has no such axis."""

ROWS, LAYERS = 13, 4
"""Rows of the global batch, which no mesh divides; layers of the model."""

MESHES = (
    "replicate2",
    "replicate3",
    "shard2",
    "shard3",
    "pipeline2",
    "pipeline3",
    "tensor2",
    "tensor4",
    "replicate2 shard2",
    "replicate2 pipeline2",
    "replicate2 tensor2",
    "shard2 pipeline2",
    "shard2 tensor2",
    "pipeline2 tensor2",
    "replicate2 shard2 pipeline2",
    "shard2 pipeline2 tensor2",
)
SCHEDULES = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
FACTORS: dict[str, tuple[str, ...]] = {
    "mesh": MESHES,
    "shard_level": ("optimizer", "gradients", "parameters", NONE),
    "schedule": (*SCHEDULES, NONE),
    "stages_per_rank": ("1", "2", "3", NONE),
    "split": ("cost", "uneven", NONE),
    "cut": ("4 rows", "6 parts", "1 row", "whole"),
    "reduce": ("backend", "ring"),
    "sequence_parallel": ("false", "true"),
    "activation_checkpoint": ("never", "always", "except_last"),
    "tie": ("false", "true"),
    "norm": ("post", "pre"),
    "positions": ("sinusoidal", "learned"),
    "activation": ("relu", "gelu"),
    "optimizer": ("sgd", "adamw"),
    "task": ("language_model", "classifier"),
}
"""Each factor with its values."""

OF_THE_MODEL = ("tie", "norm", "positions", "activation", "optimizer", "task")
"""The factors that change what is trained; the others change how."""

REFUSED = {
    "another number of stages": r"strategy\.schedule=\w+ has \d stages? a rank, not strategy\.stages_per_rank=\d",
    "more stages than layers": r"has more stages than model\.n_layers=4 can fill; (at most 6|6 stages at most)",
}
"""Why config.check refuses a pair, and what it says."""

UNUSED = ("no pipeline axis", "no shard axis", "no tensor axis", "no embedding to tie")
"""Why the other pairs that are in no row mean nothing: they are taken, and train what they would without."""

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]

AXIS_OF = {
    "shard_level": "shard",
    "schedule": "pipeline",
    "stages_per_rank": "pipeline",
    "split": "pipeline",
}
"""Factors that one axis alone uses."""


def sizes(mesh: str) -> dict[str, int]:
    """The axes that a mesh names."""
    return {word.rstrip("0123456789"): int(word[-1]) for word in mesh.split()}


def impossible(row: Row) -> str | None:
    """Why no run can have these values, some factors perhaps left open; None if nothing speaks against it."""
    mesh = sizes(row.get("mesh", ""))
    for factor, axis in AXIS_OF.items():
        if "mesh" in row and factor in row and (axis in mesh) != (row[factor] != NONE):
            return f"no {axis} axis" if axis not in mesh else "an axis has its options"
    pipelines = {row[factor] != NONE for factor, axis in AXIS_OF.items() if axis == "pipeline" and factor in row}
    if len(pipelines) == 2:
        return "an axis has its options"
    if row.get("sequence_parallel") == "true" and "mesh" in row and "tensor" not in mesh:
        return "no tensor axis"
    if row.get("tie") == "true" and row.get("task") == "classifier":
        return "no embedding to tie"
    return _too_many_stages_or_few_parts(row, mesh)


def _too_many_stages_or_few_parts(row: Row, mesh: dict[str, int]) -> str | None:
    schedule, stages = row.get("schedule", NONE), int(row.get("stages_per_rank", NONE).replace(NONE, "0"))
    if schedule != NONE and stages and STAGES_PER_RANK.get(schedule, stages) != stages:
        return "another number of stages"
    if mesh.get("pipeline", 1) * stages > LAYERS + 2:
        return "more stages than layers"
    if schedule == NONE or not stages or not mesh or "cut" not in row:
        return None
    if runnable(schedule, mesh["pipeline"], stages, parts_of_a_copy(row, mesh)) != schedule:
        return "another schedule takes its place"
    return None


def parts_of_a_copy(row: Row, mesh: dict[str, int]) -> int:
    """The micro-batches that a data-parallel rank of a pipeline takes."""
    copies = mesh.get("replicate", 1) * mesh.get("shard", 1)
    whole = 1 if row["schedule"] == "naive" else ROWS  # what config.check makes of it is single rows, at these sizes
    parts = {"4 rows": -(-ROWS // 4), "6 parts": 6, "1 row": ROWS, "whole": whole}[row["cut"]]
    return -(-parts // copies)


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of values in a row; what has no meaning there makes none."""
    meant = [item for item in row.items() if item[1] != NONE]
    return {frozenset(pair) for pair in combinations(meant, 2)}


def all_pairs() -> list[Pair]:
    """Every pair of values of two factors."""
    meant = {factor: [v for v in values if v != NONE] for factor, values in FACTORS.items()}
    return [
        frozenset(((one, a), (other, b)))
        for one, other in combinations(FACTORS, 2)
        for a, b in product(meant[one], meant[other])
    ]


def completed(row: Row, missing: set[Pair], used: dict[tuple[str, str], int]) -> Row | None:
    """A whole row with these values that has many of the missing pairs; None if there is no such row.

    Greedy, and back from a dead end. used: how often each value stands in the table; of equals the rarest is taken
    """
    factor = next((factor for factor in FACTORS if factor not in row), None)
    if factor is None:
        return row

    def worth(value: str) -> tuple[int, int]:
        new = sum(frozenset(((factor, value), item)) in missing for item in row.items())
        return -new, used.get((factor, value), 0)

    for value in sorted(FACTORS[factor], key=worth):
        longer = row | {factor: value}
        if impossible(longer) is None and (found := completed(longer, missing, used)) is not None:
            return found
    return None


def generate() -> list[Row]:
    """The table: row after row for the first pair that no row has yet."""
    possible = [pair for pair in all_pairs() if impossible(dict(pair)) is None]
    possible = [pair for pair in possible if completed(dict(pair), set(), {}) is not None]
    missing, rows, used = set(possible), [], {}
    for pair in possible:
        if pair in missing:
            row = completed(dict(pair), missing, used)
            assert row is not None
            rows.append({factor: row[factor] for factor in FACTORS})
            missing -= pairs_of(row)
            used |= {item: used.get(item, 0) + 1 for item in row.items()}
    return rows


def quick(rows: list[Row], count: int) -> list[Row]:
    """The rows for every day: new values first, then most new pairs for the ranks that they start."""
    chosen: list[Row] = []
    for _ in range(count):
        values = {item for row in chosen for item in row.items()}
        pairs = set().union(*map(pairs_of, chosen))
        worth = [
            (len(row.items() - values), len(pairs_of(row) - pairs) / (ranks_of(row) + 2), -number)
            for number, row in enumerate(rows)
        ]
        chosen.append(rows[-max(worth)[2]])
    return chosen


def ranks_of(row: Row) -> int:
    """The ranks that a row's mesh starts."""
    return math.prod(sizes(row["mesh"]).values())


def read() -> list[Row]:
    """The committed table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[Row]) -> None:
    """Write the table."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FACTORS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


COMMON = [
    "model=tiny",
    f"model.n_layers={LAYERS}",
    "model.d_model=16",
    "model.d_ff=32",
    "model.dropout=0.2",
    f"trainer.global_batch={ROWS}",
    "trainer.clip=0.1",
    "trainer.steps=5",
    "trainer.eval_every=3",
    "trainer.eval_batches=2",
    "precision=fp64",
]
STAND_INS = {
    "language_model": ["dataset=pydoc", "dataset.seq_len=15"],  # an odd length: sequence parallelism has to pad it
    "classifier": ["dataset=synthetic", "dataset.task=classifier", "dataset.seq_len=15"],
}
REAL = {"language_model": ["dataset=wikitext2", "dataset.seq_len=15"], "classifier": ["dataset=nsmc"]}
DATA, SEED = (REAL, "seed=4") if "SHARDLAB_DATA" in os.environ else (STAND_INS, "seed=3")
"""With a seed under which each training's last model is its best: the one that is kept, and compared."""
OPTIMIZERS = {
    "sgd": ["optimizer=sgd", "optimizer.lr=0.5", "optimizer.kwargs.momentum=0.9"],
    "adamw": ["optimizer=adamw", "optimizer.lr=1e-3", "optimizer.kwargs.weight_decay=0.5"],
}
CUTS = {
    "4 rows": ["trainer.micro_batch=4"],
    "6 parts": ["trainer.micro_batches=6"],
    "1 row": ["trainer.micro_batch=1"],
    "whole": [],
}
UNEVEN = {2: "[3,1]", 3: "[1,3,0]", 4: "[2,1,1,0]", 6: "[0,1,1,1,1,0]"}
"""By the number of stages; six have no other choice."""


def training_of(row: Row) -> list[str]:
    """The overrides that say what is trained."""
    parts = [f"model.{key}={row[key]}" for key in ("tie", "norm", "positions", "activation")]
    return [*COMMON, SEED, *parts, *OPTIMIZERS[row["optimizer"]], *DATA[row["task"]]]


def split_of(row: Row) -> list[str]:
    """The overrides that say how it is split."""
    mesh = sizes(row["mesh"])
    words = ["strategy=hybrid", f"ranks={ranks_of(row)}"]
    words += [f"strategy.{axis}={mesh.get(axis, 1)}" for axis in ("replicate", "shard", "pipeline", "tensor")]
    words += [f"strategy.{key}={row[key]}" for key in _OF_THE_STRATEGY if row[key] != NONE]
    if row["split"] == "uneven":
        words.append(f"strategy.split={UNEVEN[mesh['pipeline'] * int(row['stages_per_rank'])]}")
    return [*words, *CUTS[row["cut"]]]


_OF_THE_STRATEGY = (
    "shard_level",
    "schedule",
    "stages_per_rank",
    "reduce",
    "sequence_parallel",
    "activation_checkpoint",
)


def shown(row: Row) -> str:
    """A row in words, for a test's name: the values that aren't the usual ones."""
    usual = {"reduce": "backend", "split": "cost", "activation_checkpoint": "never"}
    said = [row["mesh"].replace(" ", "x")]
    for factor, value in row.items():
        if factor == "mesh" or value in (NONE, "false", usual.get(factor)):
            continue
        said.append({"true": factor, "ring": "ring", "uneven": "uneven"}.get(value, value.replace(" ", "")))
    return " ".join(said)


def uncovered(rows: list[Row]) -> Iterator[Pair]:
    """The pairs that no row has."""
    had = set().union(*(pairs_of(row) for row in rows))
    yield from (pair for pair in all_pairs() if pair not in had)


if __name__ == "__main__":
    write(generate())
    print(f"{len(read())} rows in {TABLE}")
