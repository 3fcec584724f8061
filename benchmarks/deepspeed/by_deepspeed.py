"""A run of shardlab's config under DeepSpeed's ZeRO: model, rows and dropout masks are ours, the rest is theirs.

Partitioning, the reduction of gradients, their norm, clipping and the update are DeepSpeed's, the optimizer one of
torch.optim. It runs on CPUs over gloo, without MPI, and compiles nothing.

Two conventions are bridged. DeepSpeed averages gradients over the ranks and divides a loss by the number of backward
passes of a step, where ours are sums from the start; so a micro-batch's loss is multiplied by both.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.config.schema import AXES, Config
from shardlab.data.dataset import Batch, open_dataset
from shardlab.data.prepared import read_meta
from shardlab.models.transformer import dropout_sites
from shardlab.parallel.axis import Axis
from shardlab.parallel.dropout import Masks, step_keys
from shardlab.parallel.loss import count_targets
from shardlab.parallel.mesh import Connected, Mesh
from shardlab.training.build import Training, build
from shardlab.training.device import meet, peak_memory, prepare_device
from shardlab.training.length import run_length
from shardlab.training.loop import steps
from shardlab.training.place import Place

STAGES = (1, 2, 3)
"""What is cut over the ranks: the optimizer's state; gradients too; parameters too (Rajbhandari et al. 2020)."""

_kept: list[object] = []
"""Holds what must outlive the process group until the process leaves by os._exit: freed earlier, gloo may hang."""


@dataclass(frozen=True)
class Ran:
    """What a rank saw of a run.

    losses: nats per target over the whole global batch, by step; norms: of the gradient, before clipping
    seconds: by step; memory: bytes by which training raised this process's peak
    """

    losses: list[float]
    norms: list[float]
    seconds: list[float]
    memory: int


def train(place: Place, config: Config, data_dir: Path, stage: int) -> Ran:
    """Train as one rank under a stage of ZeRO; the config's own strategy must be ddp.

    Every step of the run must have the same number of micro-batches on a rank, as with trainer.micro_batches.
    """
    ranks = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.ranks}
    os.environ.update({name: str(value) for name, value in ranks.items()}, DS_ACCELERATOR="cpu")
    import deepspeed

    device = prepare_device(config.runtime, place)
    meet(place, device, config.runtime.timeout)
    deepspeed.ops.__compatible_ops__ = {}  # or it would compile C++ for minutes, for inference alone
    deepspeed.init_distributed("gloo", dist_init_required=False)
    before = peak_memory(device)
    # A mesh whose ranks share the rows and have nobody to talk to: DeepSpeed does the talking.
    mesh = Connected(Mesh(replicate=place.ranks), place.rank, {axis: Axis(axis) for axis in AXES})
    training = build(config, mesh, device, open_dataset(data_dir, config.dataset))
    engine = None
    losses, norms, seconds = [], [], []
    for number, _, batch in steps(training, *run_length(config, read_meta(data_dir))):
        if engine is None:
            backwards = len(training.micro_batches(batch))
            engine, *_ = deepspeed.initialize(
                model=training.models[0],
                optimizer=training.optimizer,
                config=settings(config, stage, backwards),
                dist_init_required=False,
            )
            _kept.append((training, engine))
        started = time.perf_counter()
        loss = step(engine, training, batch, number)
        seconds.append(time.perf_counter() - started)
        losses.append(loss)
        norms.append(float(engine.get_global_grad_norm()))
    return Ran(losses, norms, seconds, peak_memory(device) - before)


def settings(config: Config, stage: int, backwards: int) -> dict[str, Any]:
    """DeepSpeed's own config for a run of ours. backwards: micro-batches of a step on a rank.

    Left alone, stage 3 keeps every parameter of up to 100,000 elements whole, and all others that are needed again
    soon: of a small model nothing would be left to gather. Here it cuts everything and frees it after use.
    """
    stage_3 = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,  # only its logs and its throughput read it
        "gradient_accumulation_steps": backwards,
        "gradient_clipping": config.trainer.clip or 0.0,
        "zero_optimization": {"stage": stage, **(stage_3 if stage == 3 else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def step(engine: Any, training: Training, batch: Batch, number: int) -> float:
    """Train on one global batch; returns its loss in nats per target, the same on every rank."""
    config, p = training.config, training.shape.dropout
    keys = step_keys(config.seed, number, dropout_sites(training.shape) if p > 0 else [], training.device)
    mine, targets = training.micro_batches(batch), count_targets(batch.targets)
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in mine:
        masks = Masks(keys, micro_batch.rows, p) if p > 0 else None
        logits = engine(micro_batch.inputs, micro_batch.lengths, masks)
        loss = training.models[0].loss(logits, micro_batch.targets) / targets
        engine.backward(loss * (dist.get_world_size() * len(mine)))
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total)
