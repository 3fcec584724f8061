"""The README's picture: the loss of several runs over each other, and below it how far they are apart.

    python docs/same_run.py OUT.png RUN RUN...

RUN: run folders, or one sweep's folder. The first run is what the others are held against.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from shardlab.tracking.record import RunRecord


def main(out: str, *folders: str) -> None:
    """Draw and save."""
    paths = [Path(folder) for folder in folders]
    if len(paths) == 1:
        paths = sorted(path.parent for path in paths[0].glob("*/events.jsonl"))
    records = [RunRecord.load(path) for path in paths]
    figure, (curves, gap) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 4.2), height_ratios=[3, 1.3], layout="constrained"
    )
    reference = records[0].losses
    for number, record in enumerate(records):
        steps = range(1, len(record.losses) + 1)
        style = {"linewidth": 3.5, "alpha": 0.35} if number == 0 else {"linewidth": 1.2}
        curves.plot(steps, record.losses, label=record.name, color=f"C{number}", **style)
        if number:
            apart = [abs(a - b) / a for a, b in zip(reference, record.losses, strict=False)]
            gap.semilogy(range(1, len(apart) + 1), [max(d, 1e-9) for d in apart], color=f"C{number}", linewidth=1)
    curves.set_ylabel("training loss, nats")
    curves.legend(frameon=False)
    gap.set_ylabel("relative\ndifference")
    gap.set_xlabel("step")
    gap.xaxis.get_major_locator().set_params(integer=True)
    gap.set_ylim(1e-9, 1e-1)
    for axes in (curves, gap):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python docs/same_run.py OUT.png RUN RUN..., or OUT.png SWEEP")
    main(*sys.argv[1:])
