"""shardlab's runs against DeepSpeed's ZeRO 1 to 3 of the same config: losses, gradient norms, seconds and memory.

Each run has fresh processes, since DeepSpeed changes torch for its whole process; the runs of a round take turns, so
that a machine whose speed drifts slows all alike.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import by_deepspeed
from by_deepspeed import STAGES, Ran

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.dataset import open_dataset
from shardlab.data.prepare import prepare
from shardlab.data.prepared import read_meta
from shardlab.launch.ranks import run_ranks
from shardlab.parallel.mesh import connect, mesh_of
from shardlab.training.build import build
from shardlab.training.device import meet, peak_memory, prepare_device
from shardlab.training.length import run_length
from shardlab.training.loop import steps
from shardlab.training.place import Place
from shardlab.training.step import train_step

COMMON = [
    "ranks=2",
    "trainer.global_batch=16",
    "trainer.micro_batches=4",
    "trainer.clip=0.5",
    "scheduler=constant",
    "precision=fp32",
    "tracking=none",
    "runtime.device=cpu",
    "runtime.threads=1",
]
OPTIMIZERS = {
    "SGD, momentum": ["optimizer=sgd", "optimizer.lr=0.1", "optimizer.kwargs.momentum=0.9"],
    "AdamW": ["optimizer=adamw", "optimizer.lr=1e-3"],
}
WARM_UP = 2
"""Steps whose time doesn't count."""

_kept: list[object] = []
"""As in by_deepspeed.py."""


def train_ours(place: Place, config: Config, data_dir: Path) -> Ran:
    """Train as one rank of shardlab's own run of the config."""
    device = prepare_device(config.runtime, place)
    meet(place, device, config.runtime.timeout)
    before = peak_memory(device)
    strategy = config.strategy
    mesh = connect(mesh_of(strategy), place.rank, device.type, config.runtime.timeout, strategy.reduce)
    training = build(config, mesh, device, open_dataset(data_dir, config.dataset))
    _kept.append(training)
    losses, norms, seconds = [], [], []
    for number, _, batch in steps(training, *run_length(config, read_meta(data_dir))):
        started = time.perf_counter()
        result = train_step(training, batch, number, config.optimizer.lr)
        seconds.append(time.perf_counter() - started)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return Ran(losses, norms, seconds, peak_memory(device) - before)


def run(function: Callable[..., Ran] | str, overrides: list[str], *further: Any) -> list[Ran]:
    """One run in fresh ranks; what each of them saw, by rank."""
    config = check(compose(overrides).config)
    arguments = (config, prepare(config.dataset), *further)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(function, arguments, config.ranks, log_dir=Path(folder))


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Relative, by step."""
    return [abs(a - b) / abs(a) for a, b in zip(ours, theirs, strict=True)]


def partners(stage: int, strategies: list[str]) -> list[str]:
    """What a stage is held against: our strategy that cuts the same, and all that are not ZeRO's."""
    return [name for name in strategies if name == f"zero{stage}" or not name.startswith("zero")]


def row(optimizer: str, stage: int, strategy: str, ours: list[list[Ran]], theirs: list[list[Ran]]) -> str:
    """A row of the table. ours, theirs: by round and rank."""
    first, other = ours[0][0], theirs[0][0]
    loss, norm = differences(first.losses, other.losses), differences(first.norms, other.norms)
    seconds = [[statistics.median(ran[0].seconds[WARM_UP:]) for ran in side] for side in (ours, theirs)]
    pairs = [a / b for a, b in zip(*seconds, strict=True)]
    memory = [max(ran.memory for ran in side[0]) / 2**20 for side in (ours, theirs)]
    return (
        f"| {stage} | {optimizer} | {strategy} | {loss[0]:.0e} | {max(loss):.0e} | {norm[0]:.0e} | {max(norm):.0e} | "
        f"{statistics.median(seconds[0]):.3f} | {statistics.median(seconds[1]):.3f} | "
        f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f}) | {memory[0]:.0f} | {memory[1]:.0f} |"
    )


def main(strategies: list[str], common: list[str], rounds: int) -> None:
    """Print a row for each optimizer, stage and partner."""
    print(f"DeepSpeed {version('deepspeed')}, torch {version('torch')}\n")
    print(
        "| stage | optimizer | ours | loss, step 1 | loss, largest | norm, step 1 | norm, largest | "
        "ours, s | DeepSpeed, s | ours / DeepSpeed | ours, MiB | DeepSpeed, MiB |"
    )
    print("|" + "---|" * 12, flush=True)
    for optimizer, its in OPTIMIZERS.items():
        ours: dict[str, list[list[Ran]]] = {strategy: [] for strategy in strategies}
        theirs: dict[int, list[list[Ran]]] = {stage: [] for stage in STAGES}
        for _ in range(rounds):
            for strategy in strategies:
                ours[strategy].append(run("compare:train_ours", [*common, *its, f"strategy={strategy}"]))
            for stage in STAGES:
                theirs[stage].append(run(by_deepspeed.train, [*common, *its, "strategy=ddp"], stage))
        for stage in STAGES:
            for strategy in partners(stage, strategies):
                print(row(optimizer, stage, strategy, ours[strategy], theirs[stage]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn (default: 3)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the config, such as model=small")
    parser.add_argument(
        "strategies", nargs="*", help="ours; stage N is held against zeroN and all others (default: ddp, zero1 to 3)"
    )
    chosen = parser.parse_args()
    common = [*COMMON, f"trainer.steps={chosen.steps}", *chosen.set]
    main(chosen.strategies or ["ddp", "zero1", "zero2", "zero3"], common, chosen.rounds)
