"""The parts of sequence parallel, checkpointing and compiling that need no second process."""

from __future__ import annotations

import pytest
import torch

from shardlab.config.check import check, settle
from shardlab.config.compose import compose
from shardlab.config.schema import Activation, Checkpoint, Norm, Positions
from shardlab.data.dataset import open_dataset
from shardlab.data.prepare import prepare
from shardlab.errors import ShardlabError
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.models.transformer import Block
from shardlab.parallel.axis import Axis
from shardlab.parallel.mesh import DATA_AXES, connect, mesh_of
from shardlab.parallel.microbatch import MicroBatch
from shardlab.parallel.part import Part, Span
from shardlab.training.build import build
from shardlab.training.compiled import compile_layers
from shardlab.training.loop import steps
from shardlab.training.passes import checkpointed_micro_batches
from shardlab.training.step import train_step

CPU = torch.device("cpu")

SLICES = [
    # positions, ranks        of each rank: first, held, of which are no padding
    (8, 2, [(0, 4, 4), (4, 4, 4)]),
    (7, 2, [(0, 4, 4), (4, 4, 3)]),
    (13, 4, [(0, 4, 4), (4, 4, 4), (8, 4, 4), (12, 4, 1)]),
    (2, 4, [(0, 1, 1), (1, 1, 1), (2, 1, 0), (3, 1, 0)]),
]


@pytest.mark.parametrize(("seq", "ranks", "slices"), SLICES)
def test_a_sequence_is_cut_into_equal_slices(seq, ranks, slices):
    parts = [Part((), Axis("tensor", rank, ranks), sequence_parallel=True) for rank in range(ranks)]
    assert [part.positions(seq) for part in parts] == [Span(*each) for each in slices]
    assert Part((), Axis("tensor", 1, ranks)).positions(seq) == Span(0, seq, seq)


@pytest.mark.parametrize("classes", [0, 2])
def test_summed_over_tensor_is_what_is_used_between_the_cut_matrices(classes):
    """A classifier's head comes after its first tokens have been gathered: every rank has its whole gradient."""
    shape = Shape(1, 8, 2, 16, 0.1, Norm.pre, Activation.relu, Positions.learned, False, 11, classes, 6)
    summed = {entry.name for entry in parameter_table(shape, sequence_parallel=True) if "tensor" in entry.summed_over}
    norms = [
        f"{norm}.{leaf}"
        for norm in ("layers.0.attention_norm", "layers.0.feed_forward_norm", "norm")
        for leaf in ("weight", "bias")
    ]
    biases = ["layers.0.attention.out.bias", "layers.0.feed_forward.down.bias"]
    assert summed == {"positions.weight", *norms, *biases}
    assert {entry.summed_over for entry in parameter_table(shape)} == {DATA_AXES}


def micro_batch(number: int) -> MicroBatch:
    return MicroBatch(number, *[torch.zeros(0)] * 4)


@pytest.mark.parametrize(
    ("which", "numbers"),
    [(Checkpoint.never, set()), (Checkpoint.always, {1, 3, 5}), (Checkpoint.except_last, {1, 3})],
)
def test_except_last_is_the_last_of_this_rank(which, numbers):
    """Data rank 1 of 2 trains 1, 3 and 5 of six micro-batches."""
    assert checkpointed_micro_batches(which, [micro_batch(number) for number in (1, 3, 5)]) == numbers
    assert checkpointed_micro_batches(Checkpoint.except_last, [micro_batch(0)]) == set()


TINY = ["model=tiny", "model.n_layers=2", "model.d_model=16", "dataset=pydoc", "dataset.seq_len=8", "runtime.threads=1"]


@pytest.mark.parametrize(("which", "computed"), [("never", 6), ("always", 12), ("except_last", 10)])
def test_a_layer_is_computed_again_for_each_checkpointed_micro_batch(which, computed, monkeypatch):
    """Two layers, three micro-batches; embedding and head are never computed again."""
    overrides = [*TINY, "trainer.micro_batches=3", f"strategy.activation_checkpoint={which}"]
    config = check(compose(overrides).config)
    mesh = connect(mesh_of(config.strategy), 0, "cpu", 1.0)
    training = build(config, mesh, CPU, open_dataset(prepare(config.dataset), config.dataset))
    calls, forward = [], Block.forward
    monkeypatch.setattr(Block, "forward", lambda *given, **named: calls.append(1) or forward(*given, **named))
    [(step, _, batch)] = steps(training, 1, 1)
    train_step(training, batch, step, 0.1)
    assert len(calls) == computed


def test_sequence_parallel_is_nothing_without_a_tensor_axis():
    settled, notes = settle(compose(["strategy=ddp", "ranks=2", "strategy.sequence_parallel=true"]))
    assert settled.config.strategy.sequence_parallel is False
    assert "sequence_parallel: false" in settled.yaml
    assert notes == ["strategy.tensor=1: strategy.sequence_parallel is left unused"]
    assert check(compose(["strategy=tensor", "strategy.sequence_parallel=true"]).config).strategy.sequence_parallel


@pytest.mark.parametrize("opted_in", [True, False])
def test_layers_are_compiled_where_the_config_says_so(opted_in):
    config = check(compose([*TINY, f"runtime.compile={opted_in}"]).config)
    mesh = connect(mesh_of(config.strategy), 0, "cpu", 1.0)
    training = build(config, mesh, CPU, open_dataset(prepare(config.dataset), config.dataset))
    layers = training.models[0].layers.values()
    assert [layer._compiled_call_impl is not None for layer in layers] == [opted_in, opted_in]


def test_compiling_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ShardlabError, match="needs a C\\+\\+ compiler, and there is no no-such-compiler; install it"):
        compile_layers([], CPU)
