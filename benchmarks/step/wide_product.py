"""Head and loss of a language model on the CPU: the head's product whole, and in columns.

Both ways do forward and backward in turn, in one process, so that a machine whose speed drifts slows both alike.

    python benchmarks/step/wide_product.py [THREADS ROWS FEATURES]
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as every rank has it, see launch/server.py

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS, ROUNDS = 28_782, 15
CASES = [(1, 350, 200), (2, 700, 200), (1, 320, 256)]
"""Threads, rows and features: a rank of tutorial_small under ddp, the whole of it, a rank of small."""


def seconds(head: Callable[[], Tensor], targets: Tensor, held: list[Tensor]) -> float:
    """Of one forward and backward. held: what gets a gradient"""
    for tensor in held:
        tensor.grad = None
    started = time.perf_counter()
    F.cross_entropy(head(), targets, reduction="sum").backward()
    return time.perf_counter() - started


def measure(threads: int, rows: int, features: int) -> str:
    """One row of the table in README.md."""
    torch.set_num_threads(threads)
    weight, bias = torch.randn(WORDS, features, requires_grad=True), torch.randn(WORDS, requires_grad=True)
    x, targets = torch.randn(rows, features, requires_grad=True), torch.randint(WORDS, (rows,))

    def columns(width: int) -> Callable[[], Tensor]:
        def head() -> Tensor:
            parts = zip(weight.split(width), bias.split(width), strict=True)
            return torch.cat([F.linear(x, *part) for part in parts], dim=-1)

        return head

    heads = {width: columns(width) for width in (WORDS, 512, 1024, 4096)}
    taken: dict[int, list[float]] = {width: [] for width in heads}
    for _ in range(ROUNDS):
        for width, head in heads.items():
            taken[width].append(seconds(head, targets, [x, weight, bias]))
    whole = taken[WORDS]
    ratios = [statistics.median(a / b for a, b in zip(taken[width], whole, strict=True)) for width in (512, 1024, 4096)]
    shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {threads} | {rows} | {features} | {1000 * statistics.median(whole):.0f} | {shown} |"


if __name__ == "__main__":
    cases = [tuple(int(word) for word in sys.argv[1:])] if len(sys.argv) > 1 else CASES
    print("| threads | rows | features | whole, ms | by 512 | by 1024 | by 4096 |\n|---|---|---|---|---|---|---|")
    for case in cases:
        print(measure(*case))
