"""The plan beside what real ranks hold and send, for each preset: `python benchmarks/plan/compare.py`.

Measured is the third step of a run: bytes counted at the collective calls, and the most bytes that parameters,
gradients (those on their way included) and optimizer state had, looked at whenever one of them changes.
"""

import sys
import tempfile
from pathlib import Path

from shardlab.analysis.plan import plan_of
from shardlab.analysis.plan_text import size
from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.data.prepare import prepare
from shardlab.data.prepared import read_meta
from shardlab.launch.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))  # the ranks import test_planned

PRESETS = ("single", "ddp", "zero1", "zero2", "zero3", "pipeline", "tensor", "hybrid ranks=4")


def main(overrides: list[str]) -> None:
    """Print a row for each preset: its rank that needs most memory, and the one that sends most."""
    print("| strategy | planned | measured | planned / measured | sent, planned | sent, measured |")
    print("|---|---|---|---|---|---|")
    for preset in PRESETS:
        words = ["model=small", "dataset=wikitext2", "runtime.threads=1", *f"strategy={preset}".split(), *overrides]
        config = check(compose(words).config)
        data = prepare(config.dataset)
        plan = plan_of(config, read_meta(data))
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks("test_planned:measured", (config, data), config.ranks, log_dir=Path(folder))
        planned, held = max(rank.memory.model for rank in plan.ranks), max(held for _, _, held, _ in ranks)
        sent = [sum(sum(kinds.values()) for kinds in axes.values()) for axes, *_ in ranks]
        most = max(rank.sent_bytes for rank in plan.ranks)
        print(
            f"| {preset} | {size(planned)} | {size(held)} | {planned / held:.4f} | {most:,} | {max(sent):,} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
