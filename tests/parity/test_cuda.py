"""The same code on CUDA with nccl. Skipped, with the reason, where there are too few GPUs."""

from __future__ import annotations

import pytest
import torch
from trained import difference, identical, train

GPUS = torch.cuda.device_count()
ONE_GPU = pytest.mark.skipif(GPUS < 1, reason="no GPU here")
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here")
FOUR_GPUS = pytest.mark.skipif(GPUS < 4, reason=f"needs 4 GPUs, {GPUS} here")

BASE = ["model=tiny", "model.dropout=0.2", "trainer.steps=20", "trainer.eval_batches=2", "trainer.clip=0.1"]
BASE += ["trainer.global_batch=13", "trainer.micro_batch=4", "optimizer=sgd", "optimizer.lr=0.5"]
TASKS = [["dataset=pydoc"], ["dataset=synthetic", "dataset.task=classifier"]]


@ONE_GPU
@pytest.mark.parametrize("task", TASKS)
def test_cuda_trains_the_same_run_as_cpu(task, tmp_path):
    overrides = [*BASE, *task, "precision=fp64"]
    cpu = train(tmp_path / "cpu", [*overrides, "runtime.device=cpu"])
    cuda = train(tmp_path / "cuda", [*overrides, "runtime.device=cuda"])
    assert difference(cpu, cuda) < 1e-9


@ONE_GPU
@pytest.mark.parametrize("task", TASKS)
def test_same_config_twice_is_bit_identical_on_cuda(task, tmp_path):
    overrides = [*BASE, *task, "runtime.device=cuda"]
    assert identical(train(tmp_path / "first", overrides), train(tmp_path / "second", overrides))


@TWO_GPUS
@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "pipeline_naive", "tensor"])
@pytest.mark.parametrize("task", TASKS)
def test_ranks_on_gpus_train_the_same_run(task, strategy, tmp_path):
    overrides = [*BASE, *task, "precision=fp64", "runtime.device=cuda"]
    one = train(tmp_path / "single", overrides)
    two = train(tmp_path / "split", [*overrides, f"strategy={strategy}", "ranks=2"])
    assert difference(one, two) < 1e-9


SPLITS = [
    "strategy=zero1",
    "strategy=zero2 strategy.reduce=ring",
    "strategy=zero3 model.tie=true",
    "strategy=zero3 strategy.activation_checkpoint=always",
    "strategy=ddp strategy.reduce=ring",
    "strategy=pipeline strategy.schedule=zbv model.tie=true",
    "strategy=pipeline strategy.schedule=interleaved_1f1b strategy.activation_checkpoint=except_last",
    "strategy=pipeline model.tie=true",
    "strategy=tensor strategy.sequence_parallel=true",
]


@TWO_GPUS
@pytest.mark.parametrize("split", SPLITS)
def test_two_gpus_train_the_same_run_under_each_option(split, tmp_path):
    overrides = [*BASE, *TASKS[0], "trainer.steps=5", "precision=fp64", "runtime.device=cuda", *split.split()]
    one = train(tmp_path / "single", [word for word in overrides if "strategy" not in word])
    two = train(tmp_path / "split", [*overrides, "ranks=2"])
    assert difference(one, two) < 1e-9


NARROW = ["precision=bf16", "precision=fp16", "precision=tf32", "precision=fp32 runtime.compile=true"]


@ONE_GPU
@pytest.mark.parametrize("how", NARROW)
def test_other_products_train_nearly_the_same_losses(how, tmp_path):
    overrides = [*BASE, *TASKS[0], "runtime.device=cuda"]
    exact, other = train(tmp_path / "fp32", overrides), train(tmp_path / "other", [*overrides, *how.split()])
    for a, b in zip(exact.column("loss"), other.column("loss"), strict=True):
        assert a == pytest.approx(b, rel=1e-2)


@FOUR_GPUS
@pytest.mark.parametrize("axes", [(2, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_products_on_gpus_train_the_same_run(axes, tmp_path):
    overrides = [*BASE, *TASKS[0], "precision=fp64", "runtime.device=cuda"]
    sizes = zip(("pipeline", "replicate", "tensor"), axes, strict=True)
    mesh = [f"strategy.{axis}={size}" for axis, size in sizes]
    one = train(tmp_path / "single", overrides)
    four = train(tmp_path / "split", [*overrides, "strategy=hybrid", "ranks=4", *mesh])
    assert difference(one, four) < 1e-9
