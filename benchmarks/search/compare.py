"""Whether a search by Optuna is worth it: TPE against random values at equal trials, and what pruning saves.

Five searches of each kind, with seeds of their own, over real trainings on the synthetic source: learning rate,
dropout, layers and optimizer. No time enters: the figures are the best validation loss of each search, and the steps
that its jobs trained.

    python benchmarks/search/compare.py [SEED ...]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRIALS, STEPS = 24, 40
SPACE = (
    "optimizer.lr=tag(log,interval(1e-5,1))",
    "model.dropout=interval(0,0.6)",
    "model.n_layers=1,2,3",
    "optimizer.name=AdamW,SGD,RMSprop",
)
FIXED = (
    *("dataset=synthetic", "dataset.train_tokens=200000", "runtime.device=cpu", "tracking=none", "trainer.test=false"),
    *(f"trainer.steps={STEPS}", "trainer.eval_every=4", "trainer.eval_batches=4", "sweep.parallel=2"),
)
KINDS = {
    "random": ("hydra.sweeper.sampler=random",),
    "tpe": ("hydra.sweeper.sampler=tpe",),
    "tpe, median pruner": ("hydra.sweeper.sampler=tpe", "hydra.sweeper.pruner=median"),
}


def search(words: tuple[str, ...], seed: int) -> tuple[float, int]:
    """The best validation loss of the trials that were trained to the end, and the steps of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        sweeper = ("hydra/sweeper=shardlab_optuna", f"hydra.sweeper.n_trials={TRIALS}", f"hydra.sweeper.seed={seed}")
        command = [sys.executable, "-m", "shardlab", "train", "-m", *sweeper, *words, *SPACE, *FIXED]
        ended = subprocess.run(
            [*command, "hydra.sweep.dir=all"], cwd=folder, capture_output=True, text=True, check=False
        )
        jobs = Path(folder, "all", "jobs.jsonl")
        if ended.returncode not in (0, 1) or not jobs.exists():  # 1: a loss became NaN, which is a failed trial
            raise SystemExit(ended.stderr)
        rows = {row["number"]: row for row in map(json.loads, jobs.open())}
        events = [json.loads(line) for path in Path(folder, "all").glob("*/events.jsonl") for line in path.open()]
        best = min(row["objective"][0] for row in rows.values() if row["status"] == "finished")
        return best, sum(event["event"] == "step" for event in events)


def main(seeds: list[int]) -> None:
    """Print each search and the medians."""
    results: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
    for seed in seeds:
        for kind, words in KINDS.items():
            best, steps = search(words, seed)
            results[kind].append((best, steps))
            print(f"seed {seed}  {kind:20}  best val/loss {best:.4f}  {steps:5} steps", flush=True)
    print()
    plain = sum(steps for _, steps in results["tpe"])
    for kind, found in results.items():
        best = statistics.median(best for best, _ in found)
        steps = sum(steps for _, steps in found)
        print(f"{kind:20}  median of the best {best:.4f}  {steps:6} steps, {100 * (1 - steps / plain):3.0f} % saved")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 2, 3, 4, 5])
