"""What ranks hold and compute by themselves, seen from inside them: memory, the vocabulary-parallel loss."""

from __future__ import annotations

import gc
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.schema import Config
from shardlab.data.dataset import open_dataset
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.parallel.mesh import Mesh, connect, mesh_of
from shardlab.parallel.microbatch import IGNORE
from shardlab.parallel.part import Part, span
from shardlab.parallel.table import Entry, Uniform
from shardlab.parallel.tensor import enter, vocabulary_cross_entropy, vocabulary_embedding
from shardlab.training.best import write_part
from shardlab.training.build import build
from shardlab.training.device import meet
from shardlab.training.evaluation import evaluate
from shardlab.training.loop import steps
from shardlab.training.place import Place
from shardlab.training.step import train_step

CPU = torch.device("cpu")


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self.elements = max([self.elements, *sizes])
        return out


def live_bytes(place: Place, config: Config, data_dir: Path) -> tuple[int, int, int, list[str]]:
    """Bytes of this rank's live parameters, elements of the largest one and of the largest tensor made on the way,
    and the parameters' names."""
    meet(place, CPU, 100.0)
    mesh = connect(mesh_of(config.strategy), place.rank, "cpu", 100.0)
    with Largest() as made:
        training = build(config, mesh, CPU, open_dataset(data_dir, config.dataset))
    alive = [thing for thing in gc.get_objects() if type(thing) is nn.Parameter and not thing.is_meta]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in alive}
    names = [name for model in training.models.values() for name, _ in model.named_parameters()]
    return sum(storages.values()), max(p.numel() for p in alive), made.elements, names


SIZES = [["model=tiny"], ["model=small", "model.n_layers=4"], ["experiment=tutorial_small"]]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[-1])
def test_no_rank_of_two_holds_more_than_0_6_of_the_parameters(size, tmp_path):
    seen = {}
    for strategy in ("single", "pipeline", "tensor"):
        config = check(compose([*size, "dataset=pydoc", f"strategy={strategy}"]).config)
        arguments = (config, prepare(config.dataset))
        seen[strategy] = run_ranks("test_rank_parts:live_bytes", arguments, config.ranks, log_dir=tmp_path)
    [(whole, _, _, names)] = seen["single"]
    for strategy in ("pipeline", "tensor"):
        assert max(held for held, *_ in seen[strategy]) <= 0.6 * whole
        assert sum(held for held, *_ in seen[strategy]) >= whole
        for _, largest, made, _ in seen[strategy]:
            assert made <= largest, "only the rank's own slice is ever made"
    first, last = ([*own] for *_, own in seen["pipeline"])
    assert sorted([*first, *last]) == sorted(names)
    assert "embedding.weight" not in last
    assert "head.weight" not in first
    for *_, own in seen["tensor"]:
        assert own == names


WORDS, D = 11, 6  # three ranks hold 4, 4 and 3 of them, five 3, 3, 3, 2 and none


def vocabulary(place: Place, ranks: int) -> dict[str, float]:
    """Loss and gradients of a split head and embedding, and what torch gives for the whole."""
    meet(place, CPU, 100.0)
    axis = connect(Mesh(tensor=ranks), place.rank, "cpu", 100.0).axes["tensor"]
    generator = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(2, WORDS, D, dtype=torch.float64, generator=generator)
    tokens, targets = torch.randint(0, WORDS, (2, 8), generator=generator)
    targets[3] = IGNORE
    own = span(WORDS, axis)
    padding = (0, 0, 0, own.size - own.valid)
    e, h = (F.pad(w[own.first :][: own.valid], padding).requires_grad_() for w in (embedding, head))
    x = vocabulary_embedding(tokens, e, own.first, axis)
    logits = enter(x * 9, axis) @ h.t()
    loss = vocabulary_cross_entropy(logits, targets, own.first, own.valid, axis) / 3
    loss.backward()
    embedding.requires_grad_()
    head.requires_grad_()
    whole = F.cross_entropy(F.embedding(tokens, embedding) * 9 @ head.t(), targets, reduction="sum") / 3
    whole.backward()
    apart = {"loss": loss - whole}
    for name, mine, all_of_it in (("embedding", e, embedding), ("head", h, head)):
        apart[name] = mine.grad[: own.valid] - all_of_it.grad[own.first :][: own.valid]
        apart[f"{name}'s padding"] = mine.grad[own.valid :]
    return {name: float(value.detach().abs().sum()) for name, value in apart.items()}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_vocabulary_parallel_loss_and_gradients_are_torchs(ranks, tmp_path):
    for apart in run_ranks("test_rank_parts:vocabulary", (ranks,), ranks, log_dir=tmp_path):
        for name, value in apart.items():
            assert value < 1e-12, name


def evaluated(place: Place, config: Config, data_dir: Path) -> list[dict[str, float]]:
    """What an evaluation says before the first step, between steps, and after the last."""
    meet(place, CPU, 100.0)
    dataset = open_dataset(data_dir, config.dataset)
    training = build(config, connect(mesh_of(config.strategy), place.rank, "cpu", 100.0), CPU, dataset)
    said = [evaluate(training, "val", 2)]
    for step, _, batch in steps(training, 2, 2):
        train_step(training, batch, step, 0.1)
        said.append(evaluate(training, "val", 2))
    return said


@pytest.mark.parametrize("task", ["dataset=pydoc", "dataset=synthetic dataset.task=classifier"])
def test_evaluation_works_before_during_and_after_training(task, tmp_path):
    cut = ["model=tiny", *task.split(), "trainer.micro_batches=8", "precision=fp64", "runtime.threads=1"]
    expected: list[dict[str, float]] = []
    for strategy in ("strategy=single", "strategy=pipeline", "strategy=hybrid ranks=4"):
        config = check(compose([*cut, *strategy.split()]).config)
        arguments = (config, prepare(config.dataset))
        for said in run_ranks("test_rank_parts:evaluated", arguments, config.ranks, log_dir=tmp_path):
            expected = expected or said
            for one, other in zip(expected, said, strict=True):
                assert one == pytest.approx(other, rel=1e-12)
    assert len({values["loss"] for values in expected}) == 3


def padding(place: Place, config: Config, data_dir: Path) -> list[float]:
    """The largest values of the padding that this rank holds after two steps."""
    meet(place, CPU, 100.0)
    dataset = open_dataset(data_dir, config.dataset)
    training = build(config, connect(mesh_of(config.strategy), place.rank, "cpu", 100.0), CPU, dataset)
    for step, _, batch in steps(training, 2, 2):
        train_step(training, batch, step, 0.1)
    held = [(p.detach().clone(), training.part.valid(entry)) for entry, p in training.held]
    for value, valid in held:
        value[valid] = 0.0
    return [float(value.abs().max()) for value, valid in held if value[valid].numel() < value.numel()]


def test_padding_of_the_vocabulary_stays_zero(tmp_path):
    overrides = ["dataset=pydoc", "strategy=tensor", "ranks=4", "optimizer=adamw", "optimizer.kwargs.weight_decay=0.5"]
    config = check(compose(overrides).config)
    arguments = (config, prepare(config.dataset))
    ranks = run_ranks("test_rank_parts:padding", arguments, 4, log_dir=tmp_path)
    assert ranks == [[], [], [], [0.0, 0.0, 0.0]]  # embedding, head and its bias: 4,086 words don't divide by 4


def test_a_write_that_stops_short_is_an_error(tmp_path):
    """An unbuffered write once left zeros in the best model when the disk was full."""
    path = tmp_path / "best"
    path.write_bytes(bytes(8000))
    entry = Entry("some.weight", (1000,), Uniform(1.0), 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        with pytest.raises(OSError, match="File too large"), path.open("r+b") as file:
            write_part(file, 1000, entry, Part(range(1)), torch.ones(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
