"""`make parity`: the whole matrix, each case on real ranks against one process. Writes RESULT.md when all have run.

`python run_matrix.py WORD...` runs the cases whose words, as printed, include these, and writes nothing.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import numpy
import torch
from matrix import OF_THE_MODEL, REFUSED, all_pairs, impossible, read, shown, split_of, training_of, uncovered
from trained import Trained, difference, evaluation, train, train_together

TOLERANCE = 1e-9
RESULT = Path(__file__).with_name("RESULT.md")

Case = tuple[str, float, str]
"""A case in words, its largest difference, and what went wrong, if anything did."""


def references(folder: Path, rows: list[dict[str, str]]) -> dict[str, Trained]:
    """The runs of one process that the rows need, by `name_of`."""
    trainings = {name_of(row): [*training_of(row), "trainer.micro_batch=4"] for row in rows}
    found = train_together(folder, trainings)
    for run in found.values():
        assert max(run.column("grad_norm")) > 0.1, "the clip must bite"
    return found


def name_of(row: dict[str, str]) -> str:
    """A name for what a row trains."""
    return "_".join(row[factor] for factor in OF_THE_MODEL)


def hold(folder: Path, row: dict[str, str], reference: Trained) -> float:
    """Train a row's case; its largest difference from the reference. Raises AssertionError if it is too large."""
    run = train(folder, [*training_of(row), *split_of(row)])
    apart = difference(reference, run)
    assert apart < TOLERANCE, f"differs by {apart:.1e}"
    for one, other in zip(evaluation(reference), evaluation(run), strict=True):
        assert one.keys() == other.keys()
        worst = max(abs(one[key] - other[key]) / max(abs(one[key]), TOLERANCE) for key in one)
        assert worst < TOLERANCE, f"evaluations differ by {worst:.1e}"
    return apart


def main(words: list[str]) -> int:
    """Run the cases; the exit status."""
    rows = [row for row in read() if all(word in f" {shown(row)} " for word in words)]
    cases: list[Case] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        singles = references(folder / "references", rows)
        for number, row in enumerate(rows):
            begun = time.monotonic()
            try:
                cases.append((shown(row), hold(folder / str(number), row, singles[name_of(row)]), ""))
            except Exception as error:
                cases.append((shown(row), float("inf"), f"{type(error).__name__}: {error}".split("\n")[0]))
            text, apart, wrong = cases[-1]
            print(f"{number + 1:3} {text:<110} {apart:.1e} {time.monotonic() - begun:5.1f} s {wrong}", flush=True)
    bad = [case for case in cases if case[2]]
    print(f"{len(cases)} cases, {len(bad)} wrong, in {time.monotonic() - started:.0f} s")
    if not words:
        RESULT.write_text(report(cases, time.monotonic() - started), encoding="utf-8")
    return 1 if bad else 0


def report(cases: list[Case], seconds: float) -> str:
    """RESULT.md."""
    bad = [case for case in cases if case[2]]
    left = Counter(impossible(dict(pair)) or "" for pair in uncovered(read()))
    refused = sum(left[reason] for reason in REFUSED)
    data = "wikitext2 and nsmc" if "SHARDLAB_DATA" in os.environ else "the stand-ins pydoc and synthetic"
    largest = max(cases, key=lambda case: case[1])
    pairs = len(all_pairs())
    lines = [
        "# The parity matrix: the last run of all of it",
        "",
        f"`make parity` on {date.today()}, Python {platform.python_version()}, torch {torch.__version__}, numpy "
        f"{numpy.__version__}, {os.cpu_count()} cores, {seconds / 60:.0f} minutes; data: {data}.",
        "",
        f"- {len(cases)} cases on real ranks in fp64, 13 rows a step, dropout on, a clip that bites, an evaluation on "
        f"the way: {len(cases) - len(bad)} are the same run as one process within {TOLERANCE:.0e}, "
        f"{len(bad)} are not.",
        f"- The largest difference of a loss, norm, evaluation or tensor is {largest[1]:.1e} ({largest[0]}).",
        f"- Of {pairs} pairs of values {pairs - sum(left.values())} are covered and {refused} refused; "
        f"{sum(left.values()) - refused} mean nothing, since one value leaves the other unused.",
        "",
        "| pairs in no case | why | |",
        "| --- | --- | --- |",
        *(f"| {n} | {why} | {'refused' if why in REFUSED else 'unused'} |" for why, n in left.most_common()),
        "",
        "| case (what is not said is the default) | largest difference |",
        "| --- | --- |",
        *(f"| {text} | {wrong or f'{apart:.1e}'} |" for text, apart, wrong in cases),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
