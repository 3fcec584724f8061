"""One model on one GPU: memory, throughput and share of the peak, in fp32, tf32, bf16, and bf16 compiled.

    python benchmarks/gpu/check.py [OUT.json] [--device cpu] [--model base] [--seq 512] [--batch 32] [--steps 30]

Under five minutes on one GPU. First it holds one step on the GPU in fp64 against the CPU, then it times. `--device cpu`
tries the script itself where there is no GPU (use --model tiny).

Peak is this machine's own: the best of several square matrix products in the same precision, measured here. Model FLOPs
are counted as 6 for each weight that multiplies (2 forward, 4 backward) and 12 * n_layers * d_model * seq_len for
attention's two products a token, uncut by the causal mask (torchtitan's and nanoGPT's convention); the embedding's
lookup, norms and dropout count nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from shardlab import train
from shardlab.config.compose import compose
from shardlab.models.cost import place_costs
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import shape_of
from shardlab.tracking.record import RunRecord

CASES = [
    # what is timed     overrides                                    precision of the products
    ("fp32", ["precision=fp32"], "fp32"),
    ("tf32", ["precision=tf32"], "tf32"),
    ("bf16", ["precision=bf16"], "bf16"),
    ("bf16, compiled", ["precision=bf16", "runtime.compile=true"], "bf16"),
]
WARM_UP = 10
"""Steps that are not timed: kernels are chosen, or compiled."""


def peak(device: torch.device, precision: str) -> float:
    """FLOP/s of the best of some square products."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    sizes = (4096, 8192) if device.type == "cuda" else (1024,)
    best = 0.0
    for size in sizes:
        a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
        for _ in range(8):
            wait(device)
            started = time.perf_counter()
            _ = a @ b
            wait(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(folder: Path, overrides: list[str]) -> RunRecord:
    """Train one run, of which nothing goes to MLflow."""
    return train([*overrides, f"run_dir={folder}", "tracking=none", "trainer.test=false", "strategy=single"])


def flops_per_token(model: str, words: int, seq: int) -> float:
    """Forward and backward of the model's own work; see above."""
    shape = shape_of(compose([f"model={model}"]).config.model, words, 0, seq)
    return 3 * sum(place.time for place in place_costs(shape, parameter_table(shape))[1:])


def main() -> None:
    """Check, time, print a table and save the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", default="gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="base")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    print(f"{name}, torch {torch.__version__}, model={asked.model}, {asked.batch} x {asked.seq} tokens a step")
    common = [f"model={asked.model}", f"runtime.device={asked.device}", "dataset=pydoc", f"dataset.seq_len={asked.seq}"]
    common += [f"trainer.global_batch={asked.batch}", f"trainer.steps={asked.steps}", "trainer.eval_batches=1"]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        small = ["model=tiny", "precision=fp64", "trainer.steps=3", "trainer.eval_batches=1"]
        losses = [
            run(folder / f"same-{where}", [*small, f"runtime.device={where}"]).losses for where in ("cpu", asked.device)
        ]
        apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
        print(f"fp64, three steps of tiny: the losses differ from the CPU's by at most {apart:.1e}")
        for what, overrides, precision in CASES:
            if precision == "tf32" and device.type != "cuda":
                continue
            record = run(folder / what.replace(" ", ""), [*common, *overrides])
            events = [event for event in record.events if event["event"] == "step"][WARM_UP:]
            start = next(event for event in record.events if event["event"] == "start")
            tokens = statistics.median(event["tokens"] / event["seconds"] for event in events)
            done = tokens * flops_per_token(asked.model, start["vocab_size"], asked.seq)
            most = peak(device, precision)
            rows.append(
                {
                    "case": what,
                    "tokens_per_s": tokens,
                    "peak_memory_gib": record.ranks[0]["peak_memory"] / 2**30,
                    "tflops": done / 1e12,
                    "peak_tflops": most / 1e12,
                    "share": done / most,
                    "last_loss": events[-1]["loss"],
                }
            )
    print(
        "\n| | tokens/s | peak memory, GiB | TFLOP/s | of the measured peak | loss at the end |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['case']} | {row['tokens_per_s']:,.0f} | {row['peak_memory_gib']:.2f} | {row['tflops']:.2f} | "
            f"{row['share']:.0%} of {row['peak_tflops']:.1f} | {row['last_loss']:.3f} |"
        )
    Path(asked.out).write_text(json.dumps({"device": name, "apart_fp64": apart, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
