"""torch's fully_shard around the same model: a step as one would write it, of the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardlab.data.dataset import Batch
from shardlab.models.transformer import Transformer, whole
from shardlab.parallel.loss import count_targets
from shardlab.parallel.values import materialise
from shardlab.training.build import Training, build_optimizer


def fully_sharded_step(training: Training) -> Callable[[Batch], tuple[float, float]]:
    """A step on a batch: returns loss and gradient norm. training: whose config, first values and cut it takes

    Each layer is a unit, the rest another, as fully_shard's manual has it; gradients are summed, not averaged.
    """
    model = Transformer(training.shape)
    dtype = training.held[0][1].dtype
    materialise([model], training.table, whole(training.shape), training.config.seed, lambda _, value: value.to(dtype))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers.values(), model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    optimizer = build_optimizer(training.config, [*model.parameters()])
    clip = training.config.trainer.clip
    assert clip is not None

    def step(batch: Batch) -> tuple[float, float]:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in training.micro_batches(batch):
            logits = model(micro_batch.inputs, micro_batch.lengths)
            loss = model.loss(logits, micro_batch.targets) / count_targets(batch.targets)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        dist.all_reduce(total)
        optimizer.step()
        assert isinstance(norm, DTensor)
        return float(total), float(norm.full_tensor())

    return step
