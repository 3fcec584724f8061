"""ZeRO: the same steps as torch's fully_shard, as ddp where nothing else is added, and no more memory than a share.

fully_shard is the oracle here and not the code: its hooks take gradients where autograd announces them, and a
schedule that splits the backward pass announces none of the weights'.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from inside import CPU, batches, begin, in_ranks, whole_weights
from safetensors.torch import load_file
from test_rank_parts import Largest
from torch import Tensor
from trained import difference, same_bits, train

import shardlab.parallel.shard as shard
from shardlab.config.schema import Activation, Config, Norm, Positions, ShardLevel
from shardlab.launch.ranks import run_ranks
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.models.transformer import Transformer, whole
from shardlab.parallel.axis import Axis
from shardlab.parallel.loss import count_targets
from shardlab.parallel.mesh import Mesh, connect
from shardlab.parallel.part import Part
from shardlab.parallel.shard import Sharded
from shardlab.parallel.units import units
from shardlab.parallel.values import materialise
from shardlab.training.best import best_path, load_best, save_best
from shardlab.training.build import Training
from shardlab.training.device import meet
from shardlab.training.place import Place
from shardlab.training.step import train_step

SMALL = ["seed=3", "model=tiny", "model.n_layers=3", "model.d_model=16", "model.d_ff=32", "dataset=pydoc"]
TINY = [*SMALL, "model.dropout=0", "precision=fp64", "trainer.global_batch=13", "trainer.micro_batch=4"]
TINY += ["optimizer=sgd", "optimizer.lr=0.5", "optimizer.kwargs.momentum=0.9"]
LEVELS = ["zero1", "zero2", "zero3"]


# ---- against torch's fully_shard


class FullyShard:
    """The same model and steps by torch's own parts: fully_shard, clip_grad_norm_, SGD."""

    def __init__(self, training: Training, axis: Axis) -> None:
        from torch.distributed.fsdp import fully_shard  # takes seconds, which the other tests' ranks need not wait

        self.training = training
        model = Transformer(training.shape)
        config = training.config
        materialise(
            [model], training.table, whole(training.shape), config.seed, lambda _, value: value.to(torch.float64)
        )
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (axis.ranks,))
        for module in (*model.layers.values(), model):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)  # a SUM, as ours
            sharded.set_force_sum_reduction_for_comms(True)  # which gloo can't do by a factor
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, **config.optimizer.kwargs)

    def step(self, batch) -> tuple[float, float]:
        """Loss and norm; leaves the clipped gradients."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in self.training.micro_batches(batch):
            logits = self.model(micro_batch.inputs, micro_batch.lengths)
            loss = self.model.loss(logits, micro_batch.targets) / count_targets(batch.targets)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.config.trainer.clip)
        torch.distributed.all_reduce(total)
        self.optimizer.step()
        return float(total), float(norm.full_tensor())

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.full_tensor() for name, p in self.model.named_parameters()}


def owned_elements(training: Training, name: str, gradient: Tensor) -> list[Tensor]:
    """What of a whole parameter's gradient this rank owns, piece by piece."""
    axis = training.mesh.axes["shard"]
    pieces = []
    for unit in units(training.table, training.part, axis.ranks):
        for entry, first, stop in unit.pieces(training.part, axis.rank):
            if entry.name == name:
                offset = axis.rank * unit.owned - unit.starts[unit.entries.index(entry)]
                pieces.append(gradient.flatten()[offset + first : offset + stop])
    return pieces


def against_fully_shard(place: Place, config: Config, data_dir: Path) -> dict[str, float]:
    """The largest relative differences of three steps."""
    training = begin(place, config, data_dir)
    theirs = FullyShard(training, training.mesh.axes["shard"])
    apart: dict[str, float] = defaultdict(float)

    def note(kind: str, a: Tensor, b: Tensor, scale: float) -> None:
        apart[kind] = max(apart[kind], float((a - b).abs().max()) / scale)

    for step, batch in batches(training, 3):
        ours = train_step(training, batch, step, config.optimizer.lr)
        loss, norm = theirs.step(batch)
        apart["loss"] = max(apart["loss"], abs(ours.loss - loss) / loss)
        apart["norm"] = max(apart["norm"], abs(ours.grad_norm - norm) / norm)
        gradients = theirs.gradients()
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        compared = 0
        for entry, piece in training.reducer.trained:
            [expected] = owned_elements(training, entry.name, gradients[entry.name])
            note("gradients", piece.grad, expected, largest)
            compared += piece.numel()
        assert compared > 0.9 * training.table.elements / place.ranks
    weights = {name: p.full_tensor() for name, p in theirs.model.named_parameters()}
    for name, value in whole_weights(training).items():
        note("weights", value, weights[name], float(weights[name].abs().max()))
    return dict(apart)


@pytest.mark.parametrize(("level", "ranks"), [("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_three_steps_are_fully_shards(level, ranks, tmp_path):
    overrides = [*TINY, "trainer.clip=0.1", f"strategy={level}", f"ranks={ranks}"]
    for apart in in_ranks("test_shard:against_fully_shard", overrides, tmp_path):
        assert apart.keys() == {"loss", "norm", "gradients", "weights"}
        assert max(apart.values()) < 1e-12, apart


# ---- against ddp


def test_level_1_of_two_ranks_without_a_clip_is_ddps_bits(tmp_path):
    """Both sum a rank's micro-batches first, and a + b is b + a. (A clip's norm is added in pieces: other bits.)"""
    overrides = [*SMALL, "model.dropout=0.2", "trainer.global_batch=13", "trainer.micro_batch=4", "trainer.steps=6"]
    overrides += ["trainer.eval_batches=2", "trainer.clip=null", "optimizer=adamw", "ranks=2"]
    ddp, zero1 = (train(tmp_path / name, [*overrides, f"strategy={name}"]) for name in ("ddp", "zero1"))
    assert ddp.column("loss") == zero1.column("loss")
    assert all(torch.equal(value, zero1.weights[name]) for name, value in ddp.weights.items())
    zero2 = train(tmp_path / "zero2", [*overrides, "strategy=zero2"])
    assert difference(ddp, zero2) < 1e-5
    assert not same_bits(ddp, zero2), "sums over ranks first, then over micro-batches: the check above can fail"


# ---- memory


class Spy:
    """What a rank has at a time while it computes.

    gathered: the most places whose parameters are here; unreduced: the most units whose gradients are here whole
    """

    def __init__(self, training: Training) -> None:
        self.gathered = self.unreduced = 0
        held = training.reducer._held
        room, reduce = shard._make_room, training.reducer._reduce

        def make_room(one) -> None:
            room(one)
            self.gathered = max(self.gathered, len({place for each in held if each.here for place in each.unit.places}))

        def note_and_reduce(one) -> None:
            self._note(training)
            reduce(one)
            self._note(training)

        shard._make_room, training.reducer._reduce = make_room, note_and_reduce

    def _note(self, training: Training) -> None:
        filling = sum(held.summands is not None for held in training.reducer._held)
        self.unreduced = max(self.unreduced, filling + len(training.reducer._reducing))


def live_bytes() -> dict[int, int]:
    """Bytes of every tensor that is alive in this process, by address."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and not thing.is_meta]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}


def memory(place: Place, config: Config, data_dir: Path) -> dict[str, float]:
    """Bytes that are alive after two steps with Adam, and the largest things on the way, in elements or in number."""
    before = live_bytes().keys()
    with Largest() as made:
        training = begin(place, config, data_dir)
    spy = Spy(training)
    for step, batch in batches(training, 2):
        train_step(training, batch, step, 0.1)
    del batch
    sizes = [unit.size for unit in units(training.table, training.part, place.ranks)]
    return {
        "elements": sum(sizes),
        "largest unit": max(sizes),
        "largest made": made.elements,
        "live": sum(size for address, size in live_bytes().items() if address not in before),
        "gathered": spy.gathered,
        "unreduced": spy.unreduced,
    }


@pytest.mark.parametrize(("level", "whole", "shared"), [("zero1", 8, 8), ("zero2", 4, 12), ("zero3", 0, 16)])
def test_a_rank_keeps_its_share_and_no_more(level, whole, shared, tmp_path):
    """Bytes a parameter of fp32 Adam: 4 of the value, 4 of the gradient, 8 of the state (the paper's section 3)."""
    overrides = [*SMALL, "optimizer=adamw", "trainer.global_batch=6", "trainer.micro_batch=1"]
    for found in in_ranks("test_shard:memory", [*overrides, f"strategy={level}", "ranks=3"], tmp_path):
        expected = found["elements"] * (whole + shared / 3)
        assert expected <= found["live"] < 1.01 * expected + 20_000  # rows, position vectors
        assert found["largest made"] <= found["largest unit"]
        if level != "zero1":
            assert found["unreduced"] <= 3  # one is filled, one is under way, one is taken next
        if level == "zero3":
            assert found["gathered"] == 2


# ---- the whole of it


def written_and_read(place: Place) -> dict[str, list[str]]:
    """By level, which values are not what they should be, at sizes that divide badly."""
    meet(place, CPU, 60.0)
    axis = connect(Mesh(shard=place.ranks), place.rank, "cpu", 60.0).axes["shard"]
    return {level.name: differing_values(axis, level) for level in ShardLevel}


def differing_values(axis: Axis, level: ShardLevel) -> list[str]:
    """Put values, gather them, write to them, gather them again."""
    shape = Shape(2, 6, 2, 10, 0.0, Norm.post, Activation.relu, Positions.sinusoidal, False, 11, 0, 7)
    table, part = parameter_table(shape), Part(range(-1, 3))
    made = Sharded(units(table, part, axis.ranks), part, level, axis, Axis("replicate"), torch.float32, CPU)
    model = Transformer(shape)
    expected: dict[str, Tensor] = {}

    def put(entry, value: Tensor) -> Tensor:
        expected[entry.name] = value.clone()
        return made.put(entry, value)

    materialise([model], table, part, 1, put)
    made.attach([(table[name], p) for name, p in model.named_parameters()], lambda _: 1)

    def differing() -> list[str]:
        found = {e.name: p.detach().clone() for group in made.gathered() for e, p in group}
        assert found.keys() == expected.keys()
        return [name for name, value in found.items() if not torch.equal(value, expected[name])]

    wrong = differing()
    with torch.no_grad():
        for number, (entry, p) in enumerate(member for group in made.gathered() for member in group):
            p += number + 1
            expected[entry.name] += number + 1
    wrong += differing()
    for _, piece in made.trained:  # as an optimizer would: each rank its own pieces
        piece.data *= -2
    made.publish()
    for value in expected.values():
        value *= -2
    return wrong + differing()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_is_written_to_a_gathered_parameter_is_kept(ranks, tmp_path):
    for found in run_ranks("test_shard:written_and_read", (), ranks, log_dir=tmp_path):
        assert found == {"optimizer": [], "gradients": [], "parameters": []}


def saved_and_loaded(place: Place, config: Config, data_dir: Path, folder: Path) -> dict[str, bool]:
    """Whether a saved model comes back, bit for bit, after further training, and trains on as it did."""
    training = begin(place, config, data_dir)
    first, second, third = batches(training, 3)
    for step, batch in (first, second):
        train_step(training, batch, step, 0.1)
    saved = whole_weights(training)
    save_best(training, folder)
    loss = train_step(training, third[1], 3, 0.1).loss
    trained = whole_weights(training)
    load_best(training, folder)
    loaded = whole_weights(training)
    file = load_file(best_path(folder))
    training.mesh.wait()
    return {
        "the step changed them all": not any(torch.equal(value, saved[name]) for name, value in trained.items()),
        "back": all(torch.equal(value, saved[name]) for name, value in loaded.items()),
        "in the file": all(torch.equal(value, file[name]) for name, value in saved.items()),
        "used": train_step(training, third[1], 3, 0.1).loss == loss,
    }


HYBRID = ["strategy=hybrid", "ranks=4", "strategy.tensor=1"]
SAVED = [
    *([f"strategy={level}", "ranks=3", tie] for level, tie in zip(LEVELS, ("", "model.tie=true", ""), strict=True)),
    ["strategy=zero3", "ranks=2", "model.tie=true"],
    [*HYBRID, "strategy.pipeline=1", "strategy.shard=2", "strategy.replicate=2"],
    [*HYBRID, "strategy.shard=2", "strategy.shard_level=optimizer", "model.tie=true"],
]


@pytest.mark.parametrize("strategy", SAVED, ids=" ".join)
def test_the_best_model_is_saved_and_loaded_whole(strategy, tmp_path):
    for found in in_ranks("test_shard:saved_and_loaded", [*TINY, *filter(None, strategy)], tmp_path, tmp_path):
        assert all(found.values()), found
