"""A data-parallel step with our GradientSum against one with torch's DistributedDataParallel and a SUM hook.

Both sides train the same model on the same two ranks, in turn within one process, so that a machine whose speed
drifts slows both alike. Gradients of the two are compared too.

    python benchmarks/reducer/compare.py [STEPS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardlab.config.schema import Activation, Norm, Positions
from shardlab.launch.ranks import run_ranks
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.models.transformer import Transformer
from shardlab.parallel.axis import Axis
from shardlab.parallel.loss import summed_cross_entropy
from shardlab.parallel.replicate import GradientSum
from shardlab.parallel.values import held, materialise, uses
from shardlab.training.place import Place

SIZES = {
    "tiny": {"n_layers": 4, "d_model": 64, "n_heads": 4, "d_ff": 128},
    "small": {"n_layers": 8, "d_model": 256, "n_heads": 4, "d_ff": 1024},
}
VOCABULARY, ROWS, SEQ, MICRO_BATCHES = 28782, 4, 64, 2
_kept: list[object] = []


def make(size: str) -> Transformer:
    """The size `size` with WikiText-2's vocabulary, without dropout."""
    shape = Shape(
        **SIZES[size],
        dropout=0.0,
        norm=Norm.post,
        activation=Activation.relu,
        positions=Positions.sinusoidal,
        tie=False,
        vocab_size=VOCABULARY,
        classes=0,
        max_len=SEQ,
    )
    model = Transformer(shape)
    materialise([model], parameter_table(shape), model.part, 1, lambda _, value: value)
    return model


def summed(bucket_owner: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's gradient hook that sums instead of averaging."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def measure(place: Place, size: str, steps: int) -> tuple[list[float], list[float], float]:
    """Seconds of each step, ours and theirs, and the largest difference of their gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.ranks)
    ours, theirs = make(size), make(size)
    axis = Axis("replicate", place.rank, place.ranks, dist.group.WORLD)
    reducer = GradientSum(held([ours], parameter_table(ours.shape)), uses([ours]), axis)
    wrapped = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, summed)
    _kept.extend([ours, wrapped])
    generator = torch.Generator().manual_seed(place.rank)
    inputs = torch.randint(0, VOCABULARY, (MICRO_BATCHES, ROWS, SEQ), generator=generator)
    lengths = torch.full((ROWS,), SEQ)

    def backward(model: torch.nn.Module, rows: torch.Tensor) -> None:
        (summed_cross_entropy(model(rows, lengths), rows) / inputs.numel() / place.ranks).backward()

    def our_step() -> None:
        reducer.start(MICRO_BATCHES)
        for rows in inputs:
            backward(ours, rows)
        reducer.finish()

    def their_step() -> None:
        wrapped.zero_grad(set_to_none=True)
        with wrapped.no_sync():
            for rows in inputs[:-1]:
                backward(wrapped, rows)
        backward(wrapped, inputs[-1])

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        for step, seconds in zip((our_step, their_step), times, strict=True):
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            seconds.append(time.perf_counter() - started)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return *times, max(float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs)


def main(steps: int = 15) -> None:
    """Print a row a size."""
    print("| size | ours, s | DDP, s | ours / DDP, median of pairs | largest difference of a gradient |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs, apart = run_ranks("compare:measure", (size, steps), 2, log_dir=Path(folder))[0]
        pairs = [a / b for a, b in zip(ours[2:], theirs[2:], strict=True)]
        print(
            f"| {size} | {statistics.median(ours[2:]):.3f} | {statistics.median(theirs[2:]):.3f} | "
            f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f}) | {apart:.0e} |"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
