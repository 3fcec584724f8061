"""What a further job of a sweep costs beyond its own training: shardlab against plain Hydra that starts torchrun.

Each side runs a sweep of FEW jobs and one of MANY, in turn, ROUNDS times; what the MANY take longer, less what their
ranks spent in steps and evaluations, divided by the number of further jobs, is the price of one. shardlab logs to
MLflow and keeps its records meanwhile; the other side logs nothing.

    python benchmarks/sweep/compare.py [ROUNDS]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEW, MANY, STEPS = 2, 8, 10
PLAIN = Path(__file__).with_name("plain_app.py")


def shardlab(jobs: int, folder: Path, *words: str) -> tuple[float, float]:
    """Seconds of the command, and those that the ranks spent in steps and evaluations."""
    run = ["train", "-m", f"seed=range({jobs})", "strategy=ddp", "hydra.sweep.dir=all", "dataset=synthetic"]
    run += ["runtime.device=cpu", f"trainer.steps={STEPS}", "trainer.eval_batches=1", "trainer.test=false", *words]
    seconds = timed([sys.executable, "-m", "shardlab", *run], folder)
    events = [json.loads(line) for path in folder.glob("all/*/events.jsonl") for line in path.open()]
    return seconds, sum(event["seconds"] for event in events if event["event"] in ("step", "eval"))


def plain(jobs: int, folder: Path) -> tuple[float, float]:
    """The same for plain Hydra and torchrun."""
    out = folder / "seconds.txt"
    seconds = timed(
        [sys.executable, str(PLAIN), "-m", f"+seed=range({jobs})", f"+steps={STEPS}", f"+out={out}"], folder
    )
    return seconds, sum(map(float, out.read_text().split()))


def timed(command: list[str], folder: Path) -> float:
    """Seconds that the command takes in the folder."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - started


def main(rounds: int) -> None:
    """Print each round and the medians."""
    sides = {
        "shardlab": shardlab,
        "shardlab, 2 at a time": lambda jobs, folder: shardlab(jobs, folder, "sweep.parallel=2"),
        "hydra + torchrun": plain,
    }
    prices: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            taken = []
            for jobs in (FEW, MANY):
                with tempfile.TemporaryDirectory() as folder:
                    seconds, training = side(jobs, Path(folder))
                taken.append((seconds, training))
            (few, few_training), (many, many_training) = taken
            at_once = 2 if "2 at a time" in name else 1
            price = (many - few - (many_training - few_training) / at_once) / (MANY - FEW)
            prices[name].append(price)
            print(f"{name:22} {FEW} jobs {few:6.2f} s, {MANY} jobs {many:6.2f} s, a further job {price:5.2f} s")
    print()
    for name, values in prices.items():
        spread = f"({min(values):.2f} to {max(values):.2f})"
        print(f"{name:22} median {statistics.median(values):5.2f} s beyond its training {spread}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
