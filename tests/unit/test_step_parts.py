"""The small parts of a step against torch's and scikit-learn's own: cut, mesh, norm, learning rate, metrics."""

import math
from pathlib import Path

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score
from torch import nn

from shardlab.analysis.table import difference, told_apart, training_of
from shardlab.config.schema import (
    AXES,
    Config,
    ConstantConfig,
    CosineConfig,
    StepConfig,
    SyntheticConfig,
    Task,
    TrainerConfig,
)
from shardlab.data.prepared import Meta
from shardlab.errors import ShardlabError
from shardlab.parallel.axis import Axis
from shardlab.parallel.clipping import clip, global_norm, squared_norm
from shardlab.parallel.loss import summed_cross_entropy
from shardlab.parallel.mesh import Connected, Mesh
from shardlab.parallel.microbatch import IGNORE, parts, share, take
from shardlab.parallel.part import Part
from shardlab.parallel.table import Constant, Entry, ParameterTable
from shardlab.parallel.values import held
from shardlab.tracking.record import RunRecord
from shardlab.training.evaluation import count, metrics
from shardlab.training.learning_rate import learning_rate
from shardlab.training.length import run_length

ALONE = Connected(Mesh(), 0, {axis: Axis(axis) for axis in AXES})

CUTS = [
    # rows, micro_batch, micro_batches, data_ranks -> sizes
    (13, 4, None, 1, [4, 3, 3, 3]),
    (13, 4, None, 3, [4, 3, 3, 3, 0, 0]),
    (20, None, 8, 1, [3, 3, 3, 3, 2, 2, 2, 2]),
    (20, None, None, 3, [7, 7, 6]),
    (2, None, None, 3, [1, 1, 0]),
    (5, 20, None, 1, [5]),
    (1, None, 4, 2, [1, 0, 0, 0]),
]


@pytest.mark.parametrize(("rows", "micro_batch", "micro_batches", "data_ranks", "sizes"), CUTS)
def test_cut_is_even_and_complete(rows, micro_batch, micro_batches, data_ranks, sizes):
    cut = parts(rows, micro_batch, micro_batches, data_ranks)
    assert [len(part) for part in cut] == sizes
    assert [row for part in cut for row in part] == list(range(rows))
    dealt = sorted(number for rank in range(data_ranks) for number in share(cut, rank, data_ranks))
    assert dealt == list(range(len(cut)))


def test_padding_rows_copy_a_real_row_and_weigh_nothing():
    inputs, targets, lengths = torch.arange(10).view(5, 2), torch.arange(5), torch.full((5,), 2)
    part = take(1, range(3, 5), 4, inputs, targets, lengths)
    assert part.rows.tolist() == [3, 4, 3, 3]
    assert part.inputs.tolist() == [[6, 7], [8, 9], [6, 7], [6, 7]]
    assert part.targets.tolist() == [3, 4, IGNORE, IGNORE]
    ignored = take(2, range(5, 5), 2, inputs, targets, lengths)
    assert ignored.targets.tolist() == [IGNORE, IGNORE]


def test_mesh_places_every_rank_once():
    mesh = Mesh(pipeline=2, replicate=3, shard=1, tensor=2)
    places = {tuple(mesh.coordinate(rank)[axis] for axis in AXES) for rank in range(mesh.ranks)}
    assert len(places) == mesh.ranks == 12
    assert mesh.coordinate(1) == {"pipeline": 0, "replicate": 0, "shard": 0, "tensor": 1}
    assert mesh.coordinate(6)["pipeline"] == 1
    assert sorted({mesh.data_rank(rank) for rank in range(12)}) == [0, 1, 2]


@pytest.mark.parametrize(
    ("mesh", "name"),
    [(Mesh(), "single"), (Mesh(replicate=2), "ddp2"), (Mesh(2, 3), "pipeline2-ddp3"), (Mesh(shard=3), "shard3")],
)
def test_mesh_names(mesh, name):
    assert mesh.name == name


@pytest.mark.parametrize("largest", [0.5, 1e6])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_norm_and_clipping_equal_torchs(largest, dtype, rtol):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(300, 1000), (7,), (3, 2, 5)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    held = [(Entry(str(i), tuple(p.shape), Constant(0), 0), p) for i, p in enumerate(ours)]
    norm = global_norm(held, ParameterTable({entry.name: entry for entry, _ in held}), Part((0,)), ALONE)
    clip(held, norm, largest)
    expected = nn.utils.clip_grad_norm_(theirs, largest)
    assert float(norm) == pytest.approx(float(expected), rel=rtol)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=rtol, atol=0)


def test_squares_of_fp32_are_summed_in_fp64():
    x = torch.full((2**20 + 3,), 1e-4)
    assert float(squared_norm(x)) == pytest.approx(float(x[0].double() ** 2) * x.numel(), rel=1e-12)


def test_loss_parts_add_up_to_torchs_mean():
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 4, 9, dtype=torch.float64), torch.randint(0, 9, (6, 4))
    targets[2, 1:] = IGNORE
    valid = (targets != IGNORE).sum()
    total = sum(summed_cross_entropy(logits[a:b], targets[a:b]) / valid for a, b in [(0, 1), (1, 5), (5, 6)])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(total, expected)


def torch_rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=5.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_step_decay_equals_torchs_step_lr():
    ours = [learning_rate(StepConfig("step", 0.95, 2), 5.0, step, 4, 40) for step in range(1, 41)]
    theirs = torch_rates(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.95), 40)
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_cosine_equals_torchs_cosine_after_a_linear_warm_up():
    config, total = CosineConfig("cosine", 10, 0.1), 50
    ours = [learning_rate(config, 5.0, step, 7, total) for step in range(1, total + 1)]
    assert ours[:10] == pytest.approx([0.5 * n for n in range(1, 11)])
    theirs = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, total - 10, 0.5), total - 9)
    assert ours[9:] == pytest.approx(theirs, rel=1e-9)


def test_constant_rate():
    assert learning_rate(ConstantConfig("constant"), 5.0, 3, 4, 40) == 5.0


def test_metrics_equal_scikit_learns():
    torch.manual_seed(0)
    targets, logits = torch.randint(0, 2, (203,)), torch.randn(203, 2)
    padded = torch.cat([targets, torch.full((5,), IGNORE)])
    halves = [(0, 100), (100, 208)]
    more = torch.cat([logits, torch.randn(5, 2)])
    confusion = sum(count(more[a:b], padded[a:b], 2) for a, b in halves)
    ours = metrics(203.0, confusion.double().tolist())
    guess = logits.argmax(-1)
    assert ours["targets"] == 203
    assert ours["loss"] == 1.0
    for name, score in [
        ("accuracy", accuracy_score),
        ("f1", f1_score),
        ("precision", precision_score),
        ("recall", recall_score),
    ]:
        assert ours[name] == pytest.approx(score(targets, guess)), name


def test_metrics_of_a_constant_guess_are_zero_not_an_error():
    assert metrics(1.0, [5.0, 0.0, 3.0, 0.0])["f1"] == 0


def test_perplexity_is_the_exponential_of_the_loss():
    assert metrics(20.0, [10.0])["perplexity"] == pytest.approx(math.exp(2))


def test_a_tied_head_is_held_under_its_owners_entry():
    """The last pipeline stage has the head without the embedding: it must not be lost."""
    table = ParameterTable()
    table.add(Entry("embedding.weight", (3, 2), Constant(0), -1))
    table.add(Entry("head.weight", (3, 2), Constant(0), 1, tied_to="embedding.weight"))
    model = nn.Module()
    model.head = nn.Module()
    model.head.weight = nn.Parameter(torch.zeros(3, 2))
    assert [(entry.name, p is model.head.weight) for entry, p in held([model], table)] == [("embedding.weight", True)]


LENGTHS = [
    # trainer, steps in the data -> total, epoch
    ({}, (3, 3)),
    ({"epochs": 4}, (12, 3)),
    ({"steps": 7}, (7, 3)),
    ({"steps": 7, "epochs": 2}, (6, 3)),
    ({"steps": 5, "epochs": 2}, (5, 3)),
    ({"epochs": 4, "epoch_steps": 2}, (8, 2)),
    ({"epochs": 4, "epoch_steps": 9}, (12, 3)),
]


def config_of(**trainer: int) -> Config:
    dataset = SyntheticConfig("synthetic", Task.classifier, 8, 1, 50)
    scheduler = CosineConfig("cosine", 2, 0.1)
    return Config(dataset=dataset, scheduler=scheduler, trainer=TrainerConfig(global_batch=20, **trainer))


def data_of(rows: int) -> Meta:
    return Meta(name="synthetic", task=Task.classifier, vocab_size=9, n_classes=2, counts={"train": rows}, facts={})


@pytest.mark.parametrize(("trainer", "length"), LENGTHS)
def test_a_run_ends_at_whichever_limit_comes_first(trainer, length):
    assert run_length(config_of(**trainer), data_of(50)) == length


def test_a_warm_up_that_outlasts_the_run_is_refused():
    with pytest.raises(ShardlabError, match="warmup_steps=2 leaves nothing of the run's 2 steps; 0 to 1 would"):
        run_length(config_of(epochs=1), data_of(40))


DIFFERENCES = [
    ([1.0, 2.0], [1.0, 2.2], "1.0e-01"),
    ([1.0, 2.0], [1.0], "0.0e+00 (1 steps)"),
    ([1.0, 2.0], [1.0, math.nan], "nan"),
    ([1.0, math.inf], [1.0, math.nan], "0.0e+00"),
    ([1.0], [], "-"),
]


@pytest.mark.parametrize(("reference", "losses", "shown"), DIFFERENCES)
def test_a_diverged_run_is_never_shown_as_the_same(reference, losses, shown):
    assert difference(reference, losses) == shown


RUNS = [
    # name, what its config says -> the run that it is held against
    ("single-1", {"seed": 1, "ranks": 1}, "single-1"),
    ("single-2", {"seed": 2, "ranks": 1}, "single-2"),
    ("ddp-1", {"seed": 1, "ranks": 2, "run_dir": "elsewhere", "runtime": {"threads": 1}}, "single-1"),
    ("cut-2", {"seed": 2, "ranks": 1, "trainer": {"micro_batch": 4, "clip": 1.0}}, "single-2"),
    ("clip-2", {"seed": 2, "ranks": 1, "trainer": {"clip": 2.0}}, "clip-2"),
]


def test_a_run_is_held_against_the_one_that_was_to_be_the_same():
    """A sweep over seeds and strategies would otherwise compare each seed with the first."""
    first = {}
    for name, config, reference in RUNS:
        whole = {"trainer": {"clip": 1.0}, **config}
        record = RunRecord(Path(), name, name, whole, {}, [], [])
        assert first.setdefault(training_of(record), name) == reference


def test_runs_of_one_name_are_told_apart_by_what_differs():
    def run(name: str, split: list[int] | None, seed: int) -> RunRecord:
        config = {"seed": seed, "run_dir": f"runs/{seed}{split}", "strategy": {"split": split}}
        return RunRecord(Path(), name, name, config, {}, [], [])

    records = [run("a", [2, 2], 1), run("a", None, 1), run("b", [3, 1], 2)]
    assert told_apart(records) == ["a strategy.split=[2,2]", "a strategy.split=None", "b"]
