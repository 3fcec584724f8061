"""ZeRO's levels: bytes that a rank holds beside the formula, and a step's time beside ddp's and torch's fully_shard's.

    python benchmarks/zero/compare.py memory
    python benchmarks/zero/compare.py time [ROUNDS]

For the times all sides live in the same two processes and take a step each per round, on the same rows, so that a
machine whose speed drifts slows all alike; who goes first changes from round to round.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from fully_sharded import fully_sharded_step
from memory import Measured

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.dataset import Batch, open_dataset
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.parallel.mesh import connect, mesh_of
from shardlab.training.build import build
from shardlab.training.device import meet, prepare_device
from shardlab.training.place import Place
from shardlab.training.step import train_step

COMMON = ["model=small", "dataset=wikitext2", "optimizer=adamw", "optimizer.lr=1e-4", "trainer.clip=0.5"]
COMMON += ["model.dropout=0", "tracking=none", "runtime.device=cpu", "runtime.threads=1"]
LEVELS = {"ddp": (16, 0), "zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16)}
"""Bytes a parameter of fp32 Adam (4 of value, 4 of gradient, 8 of state): those of each rank, and those shared by all.

Source: Rajbhandari et al. 2020, section 3, whose 16 are of mixed precision: 2 + 2 + 12.
"""
ROWS, SEQ, MICRO_BATCHES = 16, 64, 4
SIDES = ("ddp", "zero1", "zero2", "zero3", "fully_shard")
WARM_UP = 2
"""Rounds that don't count."""
MB = 1e6

_kept: list[object] = []


def settings(strategy: str, ranks: int) -> tuple[Config, Path]:
    """The config, and the folder of its data."""
    cut = [f"dataset.seq_len={SEQ}", f"trainer.global_batch={ROWS}", f"trainer.micro_batches={MICRO_BATCHES}"]
    config = check(compose([*COMMON, *cut, f"strategy={strategy}", f"ranks={ranks}"]).config)
    return config, prepare(config.dataset)


def memory(ranks: int) -> None:
    """Print a row a level."""
    for level, (own, shared) in LEVELS.items():
        with tempfile.TemporaryDirectory() as folder:
            found: list[Measured] = run_ranks("memory:measure", settings(level, ranks), ranks, log_dir=Path(folder))
        between = max(each.between.all for each in found)
        worst = max(found, key=lambda each: each.peak.all)
        formula = worst.elements * (own + shared / ranks)
        gathered = worst.peak.parameters - worst.between.parameters
        unreduced = worst.peak.gradients - worst.between.gradients
        sizes = (formula, between, worst.peak.all, gathered, unreduced)
        formula_mb, between_mb, peak_mb, *transient_mb = (f"{size / MB:.1f}" for size in sizes)
        print(
            f"| {ranks} | {level} | {own} + {shared}/{ranks} | {formula_mb} | {between_mb} | {between / formula:.3f} | "
            f"{peak_mb} | {' | '.join(transient_mb)} |",
            flush=True,
        )


def measure_time(place: Place, configs: list[tuple[Config, Path]], rounds: int) -> tuple[list[list[float]], float]:
    """By side, seconds of each counted step; and the largest relative difference of a loss or norm from ddp's."""
    first = configs[0][0]
    device = prepare_device(first.runtime, place)
    meet(place, device, first.runtime.timeout)
    takes: list[Callable[[Batch, int], tuple[float, float]]] = []
    for config, data_dir in configs:
        mesh = connect(mesh_of(config.strategy), place.rank, device.type, config.runtime.timeout)
        training = build(config, mesh, device, open_dataset(data_dir, config.dataset))
        _kept.append(training)

        def ours(batch: Batch, number: int, training: object = training) -> tuple[float, float]:
            result = train_step(training, batch, number, first.optimizer.lr)
            return result.loss, result.grad_norm

        takes.append(ours)
    torchs = fully_sharded_step(training)
    takes.append(lambda batch, _: torchs(batch))
    _kept.append(torchs)
    times: list[list[float]] = [[] for _ in takes]
    apart = 0.0
    for number in range(1, WARM_UP + rounds + 1):
        batch = training.dataset.batch("train", number - 1, global_batch=ROWS, seed=first.seed, epoch=0)
        said: dict[int, tuple[float, float]] = {}
        for turn in range(len(takes)):
            side = (turn + number) % len(takes)
            dist.barrier()
            started = time.perf_counter()
            said[side] = takes[side](batch, number)
            dist.barrier()
            times[side].append(time.perf_counter() - started)
        apart = max(apart, *(abs(a - b) / b for each in said.values() for a, b in zip(each, said[0], strict=True)))
    return [of_side[WARM_UP:] for of_side in times], apart


def times(rounds: int) -> None:
    """Print a row a side."""
    with tempfile.TemporaryDirectory() as folder:
        configs = [settings(side, 2) for side in SIDES[:-1]]
        seconds, apart = run_ranks("compare:measure_time", (configs, rounds), 2, log_dir=Path(folder))[0]
    print(f"largest relative difference of a loss or a norm from ddp's: {apart:.0e}\n")
    print("| side | seconds, median | / ddp | quartiles | / fully_shard | quartiles |\n|---|---|---|---|---|---|")
    for name, of_side in zip(SIDES, seconds, strict=True):
        ratios = []
        for other in (seconds[0], seconds[-1]):
            pairs = [a / b for a, b in zip(of_side, other, strict=True)]
            low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
            ratios.append(f"{middle:.2f} | {low:.2f} to {high:.2f}")
        print(f"| {name} | {statistics.median(of_side):.3f} | {' | '.join(ratios)} |")


def main(what: str = "memory", rounds: int = 10) -> None:
    """Print the tables asked for."""
    if what == "time":
        times(rounds)
        return
    print(
        "| ranks | level | bytes a parameter | formula, MB | between steps, MB | / formula | peak, MB | "
        "of it gathered, MB | of it unreduced, MB |\n" + "|---" * 9 + "|",
        flush=True,
    )
    for ranks in (2, 4):
        memory(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
