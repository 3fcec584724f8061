"""The plan against real ranks: the bytes that a step sends, and the most that a rank holds of its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardlab.analysis.activations import sent_on, stage_activations
from shardlab.analysis.memory import model_memory
from shardlab.analysis.traffic import traffic
from shardlab.analysis.work import work_of
from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Checkpoint, Config
from shardlab.data.dataset import open_dataset
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.models.shape import shape_of
from shardlab.parallel import shard, weight_gradients
from shardlab.parallel.mesh import connect, mesh_of
from shardlab.parallel.shard import Sharded
from shardlab.training.build import Training, build
from shardlab.training.device import meet
from shardlab.training.loop import steps
from shardlab.training.place import Place
from shardlab.training.step import train_step

CPU = torch.device("cpu")


class Held:
    """The most bytes of parameters, gradients and optimizer state that a rank holds, looked at whenever they change."""

    def __init__(self, training: Training) -> None:
        self._training, self.most = training, 0
        for _, parameter in training.held:
            parameter.register_hook(self._arriving)
        reducer = training.reducer
        if isinstance(reducer, Sharded):
            for name in ("_reduce", "_use"):
                setattr(reducer, name, self._looking(getattr(reducer, name)))
            shard._Held.segment = self._looking(shard._Held.segment)  # called when a gradient is about to be added
        whole = weight_gradients.weight_gradient

        def looked_at(*args: Tensor) -> Tensor:
            gradient = whole(*args)
            self.look(gradient)
            return gradient

        weight_gradients.weight_gradient = looked_at

    def _looking(self, method):
        def looked_at(*args):
            self.look()
            result = method(*args)
            self.look()
            return result

        return looked_at

    def _arriving(self, gradient: Tensor) -> None:
        self.look(gradient)

    def look(self, *arriving: Tensor) -> None:
        training, reducer = self._training, self._training.reducer
        parameters = [p for _, p in (*training.held, *reducer.trained)]
        gradients = [*arriving, *(p.grad for p in parameters if p.grad is not None)]
        if isinstance(reducer, Sharded):
            for held in reducer._held:
                parameters += [held.whole, held.own]
                gradients += [held.gradient, *([] if held.summands is None else [held.summands])]
            gradients += [tensor for _, *tensors, _ in reducer._reducing for tensor in tensors]
        values = [value for each in training.optimizer.state.values() for value in each.values()]
        state = [value for value in values if isinstance(value, Tensor)]
        self.most = max(self.most, storages([*parameters, *gradients, *state]))


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' memory, each piece of it once."""
    distinct = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(distinct.values())


@contextmanager
def saved_by_forwards(training: Training) -> Iterator[list[Tensor]]:
    """All tensors that autograd saves, but for views of parameters."""
    parameters = {parameter.untyped_storage()._cdata for _, parameter in training.held}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in parameters:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def measured(place: Place, config: Config, data_dir: Path) -> tuple[dict[str, Counter], int, int, int]:
    """Of the third step: bytes sent, the length of its rows, the most bytes that were held of parameters, gradients and
    optimizer state, and all that forwards saved."""
    meet(place, CPU, 100.0)
    mesh = connect(mesh_of(config.strategy), place.rank, "cpu", 100.0, config.strategy.reduce)
    training = build(config, mesh, CPU, open_dataset(data_dir, config.dataset))
    batches = list(steps(training, 3, 3))
    for step, _, batch in batches[:2]:
        train_step(training, batch, step, 0.1)
    before = {name: Counter(axis.sent) for name, axis in mesh.axes.items()}
    held = Held(training)
    step, _, batch = batches[2]
    with saved_by_forwards(training) as saved:
        train_step(training, batch, step, 0.1)
    held.look()
    sent = {name: axis.sent - before[name] for name, axis in mesh.axes.items()}
    sent = {axis: kinds for axis, kinds in sent.items() if kinds}
    return sent, batch.inputs.shape[1], held.most, storages(saved)


SMALL = ["model=tiny", "model.n_layers=4", "trainer.global_batch=13", "trainer.micro_batch=2", "runtime.threads=1"]
HYBRID = "strategy=hybrid ranks=4 strategy.pipeline=1 strategy.tensor=1"
SEQUENCE = "strategy.sequence_parallel=true"
CASES = [
    "strategy=single",
    "strategy=ddp",
    "strategy=ddp ranks=3 strategy.reduce=ring",
    "strategy=zero1",
    "strategy=zero2 ranks=3",
    "strategy=zero3",
    "strategy=zero3 ranks=3 strategy.reduce=ring",
    "strategy=pipeline",
    "strategy=pipeline ranks=3 strategy.schedule=interleaved_1f1b strategy.stages_per_rank=2",
    "strategy=pipeline strategy.schedule=zbv",
    "strategy=pipeline strategy.schedule=dualpipev",
    "strategy=pipeline strategy.schedule=gpipe model.tie=true",
    "strategy=tensor",
    "strategy=tensor ranks=4 dataset=synthetic dataset.task=classifier",
    "strategy=hybrid ranks=4",
    f"{HYBRID} strategy.shard=2 strategy.replicate=2 strategy.shard_level=gradients",
    f"{HYBRID} strategy.shard=2 strategy.tensor=2 strategy.shard_level=optimizer optimizer=sgd",
    f"{HYBRID} strategy.shard=2 strategy.pipeline=2 strategy.schedule=zbv model.tie=true",
    f"{HYBRID} strategy.shard=2 strategy.pipeline=2 strategy.schedule=1f1b model.tie=true",
    f"{HYBRID} strategy.replicate=2 strategy.pipeline=2 strategy.schedule=interleaved_zero_bubble",
    f"{HYBRID} strategy.shard=2 strategy.pipeline=2 strategy.schedule=interleaved_zero_bubble precision=fp64",
    f"strategy=tensor ranks=3 model.n_heads=3 model.d_model=48 model.d_ff=96 {SEQUENCE}",
    f"strategy=tensor {SEQUENCE} dataset=synthetic dataset.task=classifier dataset.seq_len=33",
    f"strategy=hybrid ranks=4 {SEQUENCE} strategy.activation_checkpoint=always model.norm=pre",
    f"{HYBRID} strategy.shard=2 strategy.tensor=2 {SEQUENCE} strategy.activation_checkpoint=always",
    "strategy=tensor strategy.activation_checkpoint=except_last model.norm=pre model.dropout=0",
    f"strategy=tensor strategy.activation_checkpoint=always {SEQUENCE} model.norm=pre model.dropout=0",
    "strategy=zero3 strategy.activation_checkpoint=always model.positions=learned",
    "strategy=tensor precision=bf16",
    f"strategy=hybrid ranks=4 precision=bf16 {SEQUENCE} strategy.activation_checkpoint=always",
    "strategy=zero3 precision=fp16 model.norm=pre",
    "strategy=zero2 model.tie=true",
    "strategy=zero1 model.tie=true",
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_and_memory_are_those_of_real_ranks(case, tmp_path):
    config = check(compose([*SMALL, *case.split()]).config)
    data = prepare(config.dataset)
    dataset = open_dataset(data, config.dataset)
    ranks = run_ranks("test_planned:measured", (config, data), config.ranks, log_dir=tmp_path)
    shape = shape_of(config.model, dataset.vocab_size, dataset.n_classes, dataset.max_len)
    for rank, (sent, seq, held, saved) in enumerate(ranks):
        work = work_of(config, shape, seq=seq)
        place = work.mesh.coordinate(rank)
        at = place["pipeline"], place["shard"]
        assert traffic(work, *at) == sent, rank
        assert model_memory(work, *at).model == pytest.approx(held, rel=0.03), rank
        if config.strategy.activation_checkpoint is Checkpoint.never:
            here = work.stages_of[place["pipeline"]]
            stages = [stage_activations(work, stage, False).saved - sent_on(work, stage) for stage in here]
            assert sum(stages) * work.cut.each == pytest.approx(saved, rel=0.15), rank
