"""A rank under torchrun: a small Transformer under DistributedDataParallel, for a few steps; no logging at all."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(seed: int, steps: int, out: Path) -> None:
    """Train, and let rank 0 add to `out` the seconds that the steps took."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo")
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    body = torch.nn.Sequential(torch.nn.Embedding(1000, 64), layers)
    model = DistributedDataParallel(torch.nn.Sequential(body, torch.nn.Linear(64, 1000)))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(1000, (10, 65))
    started = time.perf_counter()
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with out.open("a") as file:
            file.write(f"{time.perf_counter() - started}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
