"""A whole training step of shardlab against one written by hand in plain torch, for each strategy.

Both sides train the same model on the same batches in the same processes, a step of each in turn, so that a machine
whose speed drifts slows both alike. Before that both train in fp64 and without dropout from the same weights, and
losses and gradient norms must agree. Strategies can't be interleaved so finely: they run one after the other.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import by_hand
import torch
import torch.distributed as dist

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.dataset import Batch, open_dataset
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.parallel.mesh import connect, mesh_of
from shardlab.training.build import DTYPES, Training, build
from shardlab.training.device import meet, prepare_device
from shardlab.training.place import Place
from shardlab.training.step import train_step

ROWS, SEQ, MICRO_BATCHES = 32, 64, 8
COMMON = [
    "model=small",
    "dataset=wikitext2",
    f"dataset.seq_len={SEQ}",
    f"trainer.global_batch={ROWS}",
    f"trainer.micro_batches={MICRO_BATCHES}",
    "trainer.clip=0.5",
    "optimizer=sgd",
    "optimizer.lr=0.5",
    "tracking=none",
    "runtime.device=cpu",
]
STRATEGIES = {
    "single": ["strategy=single", "runtime.threads=2"],
    "ddp": ["strategy=ddp", "ranks=2", "runtime.threads=1"],
    "pipeline 1f1b": ["strategy=pipeline", "ranks=2", "runtime.threads=1"],
    "pipeline gpipe": ["strategy=pipeline", "strategy.schedule=gpipe", "ranks=2", "runtime.threads=1"],
    "tensor": ["strategy=tensor", "ranks=2", "runtime.threads=1"],
}
WARM_UP = 2
"""Rounds that don't count."""
CHECKED = 2
"""Steps of the check: the second one sees what the first one's clipping and update did."""
TOLERANCE = 1e-9
"""Largest relative difference of a loss or a norm in fp64 that passes as the same mathematics. (fp32 would say less:
there the two norms, one of squares added in fp32 and one in fp64, were 3e-4 apart.)"""

Step = Callable[[Batch, int], tuple[float, float]]
"""A step on a batch by its number, from 1; returns loss and gradient norm."""

_kept: list[object] = []
"""Holds what must outlive the process group until the process leaves by os._exit: freed earlier, gloo may hang."""


@dataclass(frozen=True)
class Sides:
    """What a rank holds of both: the same weights twice."""

    training: Training
    model: by_hand.Model
    hand_written: Step

    def batch(self, number: int) -> Batch:
        """Of step `number`, all rows."""
        seed = self.training.config.seed
        return self.training.dataset.batch("train", number - 1, global_batch=ROWS, seed=seed, epoch=0)


def begin(place: Place, config: Config, data_dir: Path) -> Sides:
    """Meet the other ranks and build both sides."""
    device = prepare_device(config.runtime, place)
    meet(place, device, config.runtime.timeout)
    mesh = connect(mesh_of(config.strategy), place.rank, device.type, config.runtime.timeout)
    training = build(config, mesh, device, open_dataset(data_dir, config.dataset))
    torch.set_default_dtype(DTYPES[config.precision.name])  # for what is written by hand
    torch.manual_seed(config.seed + mesh.data_rank)  # other rows, other masks; the ranks of a tensor axis drop alike
    model = same_model(training)
    sides = Sides(training, model, hand_written_step(training, model))
    _kept.append(sides)
    return sides


def check_same(place: Place, config: Config, data_dir: Path) -> float:
    """The largest relative difference of losses and norms without dropout; RuntimeError beyond TOLERANCE."""
    sides = begin(place, config, data_dir)
    training = replace(sides.training, shape=replace(sides.training.shape, dropout=0.0))
    sides.model.eval()
    largest = 0.0
    for number in range(1, CHECKED + 1):
        ours = our_step(training)(sides.batch(number), number)
        theirs = sides.hand_written(sides.batch(number), number)
        largest = max(largest, *(abs(a - b) / abs(a) for a, b in zip(ours, theirs, strict=True)))
        if not largest < TOLERANCE:
            raise RuntimeError(f"step {number}: loss and gradient norm are {ours} ours and {theirs} by hand")
    return largest


def measure(place: Place, config: Config, data_dir: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each counted step, ours and by hand; who is first changes from round to round."""
    sides = begin(place, config, data_dir)
    steps = our_step(sides.training), sides.hand_written
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(1, WARM_UP + rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(seconds(steps[side], sides.batch(number), number))
    return times[0][WARM_UP:], times[1][WARM_UP:]


def same_model(training: Training) -> by_hand.Model:
    """The hand-written model, or this rank's part of it, with our weights: both hold theirs in the same order."""
    shape, axis = training.shape, training.part.axis
    size = by_hand.Size(shape.n_layers, shape.d_model, shape.n_heads, shape.d_ff, shape.dropout, shape.vocab_size, SEQ)
    model = by_hand.Model(size, training.part.layers, axis.rank, axis.ranks)
    with torch.no_grad():
        for (_, ours), theirs in zip(training.held, model.parameters(), strict=True):
            theirs.copy_(ours.reshape(theirs.shape))
    return model


def our_step(training: Training) -> Step:
    """shardlab's."""

    def step(batch: Batch, number: int) -> tuple[float, float]:
        result = train_step(training, batch, number, training.config.optimizer.lr)
        return result.loss, result.grad_norm

    return step


def hand_written_step(training: Training, model: by_hand.Model) -> Step:
    """The loop in by_hand.py that does what the config says."""
    config, mesh = training.config, training.mesh.mesh
    assert config.trainer.clip is not None
    recipe = by_hand.Recipe(config.optimizer.lr, config.trainer.clip, MICRO_BATCHES, ROWS * SEQ)
    if mesh.pipeline > 1:
        made = by_hand.pipeline(model, recipe, config.strategy.schedule.name)
    elif mesh.tensor > 1:
        made = by_hand.tensor(model, recipe)
    else:
        made = (by_hand.ddp if mesh.replicate > 1 else by_hand.single)(model, recipe)
    return lambda batch, _: made(batch.inputs, batch.targets)


def seconds(step: Step, batch: Batch, number: int) -> float:
    """How long a step takes, from when all ranks begin until all are done."""
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    step(batch, number)
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - started


def launch(function: str, strategy: str, *further: int, precision: str) -> Any:
    """Run one of the functions above in fresh ranks; returns what rank 0 returned."""
    config = check(compose([*COMMON, *STRATEGIES[strategy], f"precision={precision}"]).config)
    arguments = (config, prepare(config.dataset), *further)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(f"compare:{function}", arguments, config.ranks, log_dir=Path(folder))[0]


def main(rounds: int, strategies: list[str]) -> None:
    """Print a row a strategy, each as soon as it is there."""
    print("| strategy | ours, s | by hand, s | ours / by hand | quartiles | range | ours, tokens/s | check |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in strategies:
        apart = launch("check_same", name, precision="fp64")
        ours, theirs = launch("measure", name, rounds, precision="fp32")
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
        median = statistics.median(ours)
        print(
            f"| {name} | {median:.3f} | {statistics.median(theirs):.3f} | {middle:.2f} | {low:.2f} to {high:.2f} | "
            f"{min(pairs):.2f} to {max(pairs):.2f} | {ROWS * SEQ / median:,.0f} | {apart:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="a step of each side, in turn (default: 10)")
    parser.add_argument("strategies", nargs="*", help=f"any of: {', '.join(STRATEGIES)} (default: all)")
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.strategies or list(STRATEGIES))
