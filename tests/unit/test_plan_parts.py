"""The plan's arithmetic: optimizer state, activations, memory and bytes against what is known by hand; its text."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shardlab.analysis.activations import activation_memory, place_activations, stage_activations
from shardlab.analysis.candidates import Candidate, plan_many, plan_one
from shardlab.analysis.memory import model_memory
from shardlab.analysis.plan import GIB, Plan
from shardlab.analysis.plan_text import candidates_text, numbers, places, plan_text, size
from shardlab.analysis.traffic import traffic
from shardlab.analysis.work import Work, work_of
from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.config.optimizers import REFUSED, optimizers, state_elements
from shardlab.config.schema import OptimizerConfig
from shardlab.errors import ShardlabError
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape, shape_of
from shardlab.models.transformer import Transformer, dropout_sites
from shardlab.parallel.dropout import Masks, step_keys
from shardlab.parallel.values import materialise

WORDS = 1000


def work(overrides: str, classes: int = 0, seq: int = 64, words: int = WORDS) -> Work:
    config = check(compose(["model=tiny", "dataset=synthetic", *overrides.split()]).config)
    return work_of(config, shape_of(config.model, words, classes, seq))


STATE = [
    *((name, {}) for name in optimizers() if name not in REFUSED),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.0, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"amsgrad": True}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("RMSprop", {"momentum": 0.9}),
]


@pytest.mark.parametrize("shape", [(6,), (6, 4), (3, 2, 5, 7)], ids=str)
@pytest.mark.parametrize(("name", "kwargs"), STATE, ids=str)
def test_optimizer_state_is_what_torchs_class_keeps(name, kwargs, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **kwargs)
    for _ in range(2):
        parameter.grad = torch.ones(shape)
        optimizer.step()
    kept = sum(v.numel() for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.dim() > 0)
    assert state_elements(OptimizerConfig(name, 0.1, kwargs), shape) == kept


def saved(shape: Shape, rows: int, seq: int) -> dict[int, int]:
    """Bytes that autograd keeps after a forward, by place; the loss is the head's."""
    table = parameter_table(shape)
    model = Transformer(shape, table)
    materialise([model], table, model.part, 1, lambda entry, value: value)
    keys = step_keys(1, 1, dropout_sites(shape), torch.device("cpu"))
    masks = Masks(keys, torch.arange(rows), shape.dropout) if shape.dropout else None
    seen = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    by_place: dict[int, int] = {}
    alive, now = [], -1

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(tensor)
            by_place[now] = by_place.get(now, 0) + storage.nbytes()
        return tensor

    def run(place, function, x):
        nonlocal now
        now = place
        return function(x)

    x = torch.randint(0, shape.vocab_size, (rows, seq))
    targets = torch.randint(0, 2, (rows,)) if shape.classes else x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(model(x, torch.full((rows,), seq), masks, run), targets)
    return by_place


@pytest.mark.parametrize("classes", [0, 2])
@pytest.mark.parametrize("overrides", ["", "model.dropout=0", "model.activation=gelu model.dropout=0"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_activations_of_each_place_are_what_autograd_saves(norm, overrides, classes):
    planned = work(f"model.norm={norm} model.d_ff=512 {overrides}", classes)
    kept = saved(planned.shape, planned.cut.rows, planned.cut.seq)
    kept[0] -= 20 * 64 * (1 if classes else 64)  # attention's mask, one for all layers
    for place in range(-1, planned.shape.n_layers + 1):
        assert place_activations(planned, place).saved == pytest.approx(kept.get(place, 0), rel=0.01), place


def test_a_schedule_keeps_as_many_micro_batches_as_its_order_says():
    cut = "strategy=pipeline trainer.micro_batch=1"
    gpipe, one_f_one_b = (work(f"{cut} strategy.schedule={schedule}") for schedule in ("gpipe", "1f1b"))
    first, passing = stage_activations(gpipe, 0, again=False).saved, stage_activations(gpipe, 0, again=False).passing
    assert activation_memory(gpipe, 0) == 20 * first + passing
    assert activation_memory(one_f_one_b, 0) == 2 * first + passing
    zero_bubble = work(f"{cut} strategy.schedule=interleaved_zero_bubble strategy.stages_per_rank=1")
    assert activation_memory(one_f_one_b, 1) < activation_memory(zero_bubble, 1) < activation_memory(gpipe, 1)


def test_checkpointing_keeps_inputs_and_one_layer():
    whole, again, but_last = (
        work(f"trainer.micro_batches=4 strategy.activation_checkpoint={which}")
        for which in ("never", "always", "except_last")
    )
    x, layer = 5 * 64 * 64 * 4, place_activations(whole, 0)
    ends = sum(place_activations(whole, place).saved for place in (-1, 4)) + 5 * 64 * 64
    head = place_activations(whole, 4).passing
    assert activation_memory(again, 0) == 4 * x + ends + max(layer.saved + layer.passing, head)
    # What is made on the way is counted once: while a layer of another micro-batch is computed again.
    assert activation_memory(but_last, 0) == 4 * layer.saved + ends + max(layer.saved + layer.passing, head)


def test_memory_is_16_bytes_a_parameter_and_what_zero_divides():
    single = work("strategy=single optimizer=adam")
    n = single.table.elements
    assert model_memory(single, 0, 0).model == 16 * n
    assert model_memory(work("strategy=single optimizer=sgd precision=fp64"), 0, 0).model == 16 * n
    for level, least in (("zero1", 8 + 8 / 4), ("zero2", 4 + 12 / 4), ("zero3", 16 / 4)):
        memory = model_memory(work(f"strategy={level} ranks=4 optimizer=adam"), 0, 0)
        assert memory.optimizer == pytest.approx(8 * n / 4, rel=1e-3)
        assert memory.model > least * n  # buffers on the way come on top


def test_bytes_of_the_textbook():
    n = work("strategy=single").table.elements
    ddp = traffic(work("strategy=ddp ranks=4"), 0, 0)["replicate"]["all_reduce"]
    assert ddp == pytest.approx(2 * 3 / 4 * n * 4, rel=1e-3)
    zero1 = traffic(work("strategy=zero1 ranks=4"), 0, 0)["shard"]
    assert zero1["reduce_scatter"] == zero1["all_gather"] == pytest.approx(ddp / 2, rel=1e-3)
    rows = 5 * 64 * 64 * 4
    halves = work("strategy=pipeline trainer.micro_batches=4")
    assert [traffic(halves, rank, 0)["pipeline"]["send"] for rank in (0, 1)] == [4 * rows, 4 * rows]
    tensor = traffic(work("strategy=tensor trainer.micro_batches=4"), 0, 0)["tensor"]["all_reduce"]
    # 2 forward and 2 backward a layer; the embedding's forward and the head's backward; 3 numbers a target; the norm
    assert tensor == 4 * ((4 * 4 + 2) * rows + 3 * 5 * 64 * 4) + 8 * 2 * -(-len(halves.table.own) // 2)


def test_a_ring_sends_what_the_backend_is_counted_with_and_one_rank_nothing():
    assert traffic(work("strategy=ddp strategy.reduce=ring"), 0, 0) == traffic(work("strategy=ddp"), 0, 0)
    assert traffic(work("strategy=single"), 0, 0) == {}


def test_padding_rows_are_counted():
    uneven = work("strategy=ddp ranks=3 trainer.micro_batch=6")
    assert (uneven.cut.rows, uneven.cut.count, uneven.cut.each, uneven.cut.padding) == (5, 6, 2, 10)
    assert "6 micro-batches of 5 rows, 10 of them padding; 2 for each of 3 data ranks" in plan_text(
        plan_one(["strategy=ddp", "ranks=3", "trainer.micro_batch=6"])
    )


def test_what_fits_and_by_how_much():
    plan = plan_one(["strategy=ddp"])
    assert plan.room(plan.worst) is None
    needed = plan.worst.memory.total
    roomy = plan_one(["strategy=ddp", f"plan.memory_gib={(needed + 3 * 2**20) / GIB}"])
    tight = plan_one(["strategy=ddp", f"plan.memory_gib={(needed - 3 * 2**20) / GIB}"])
    assert "fits, 3.0 MiB free" in plan_text(roomy)
    assert "no, 3.0 MiB over" in plan_text(tight)
    for wrong in ("0", "-1", "inf"):
        with pytest.raises(ShardlabError, match=r"plan\.memory_gib"):
            plan_one([f"plan.memory_gib={wrong}"])


def test_candidates_are_every_combination_and_a_refused_one_is_a_row():
    candidates = plan_many(["strategy=ddp,tensor", "ranks=2,3"])
    assert [each.what for each in candidates] == [
        "strategy=ddp ranks=2",
        "strategy=ddp ranks=3",
        "strategy=tensor ranks=2",
        "strategy=tensor ranks=3",
    ]
    assert [isinstance(each.plan, Plan) for each in candidates] == [True, True, True, False]
    lines = candidates_text(candidates).splitlines()
    assert lines[4] == "tensor ranks=3  refused: strategy.tensor=3 does not divide model.n_heads=4; 1, 2 or 4 would"
    with pytest.raises(ShardlabError, match="interval"):
        plan_many(["model.dropout=interval(0,1)"])


def test_all_refused_is_still_a_table():
    text = candidates_text([Candidate("strategy=tensor", "why not")])
    assert text.splitlines()[1] == "tensor  refused: why not"


def test_equal_ranks_share_a_line_and_stages_are_told():
    text = plan_text(plan_one(["strategy=hybrid", "ranks=4", "strategy.schedule=zbv", "trainer.micro_batches=4"]))
    assert "0-1   embedding | head " in text
    assert "2-3   layers 0-2 | layer 3 " in text
    assert "Schedule zbv: ideal bubble" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "layers.*.attention.qkv.weight [3, 4, 16, 64] [3, 2, 16, 64] x 4 2-3" in lines
    every = plan_text(plan_one(["strategy=hybrid", "ranks=4"]), every_shape=True)
    assert "layers.3.attention.qkv.weight" in every
    assert all(len(line) <= 120 for line in every.splitlines())


def test_values_of_optimizer_arguments_are_left_to_the_run_and_names_are_not():
    assert plan_one(["optimizer=sgd", "optimizer.kwargs.momentum=0.9"]).worst.memory.optimizer > 0
    with pytest.raises(ShardlabError, match="did you mean 'momentum'"):
        plan_one(["optimizer=sgd", "optimizer.kwargs.momentun=0.9"])


def test_units_and_numbers_in_short():
    assert [size(count) for count in (0, 812, 2**10, 1.25 * 2**20, 150 * 2**20, 3 * 2**30)] == [
        "0",
        "812 B",
        "1.0 KiB",
        "1.2 MiB",
        "150 MiB",
        "3.0 GiB",
    ]
    assert numbers([3, 0, 1, 6, 2]) == "0-3,6"
    planned = work("strategy=single model.norm=pre")
    assert places(planned, range(-1, 5)) == "embedding, layers 0-3, norm and head"
    assert places(planned, range(2, 3)) == "layer 2"


def test_a_plan_never_imports_torch(cache):
    code = """
import sys
from shardlab.analysis.candidates import plan_one
from shardlab.analysis.plan_text import plan_text
for words in ("strategy=zero3 model.tie=true optimizer.kwargs.amsgrad=true", "strategy=hybrid ranks=4 model=small",
              "strategy=pipeline strategy.schedule=dualpipev precision=bf16"):
    plan_text(plan_one(words.split()))
print([name for name in ("torch", "mlflow", "shardlab.training.build") if name in sys.modules])
"""
    plan_one([])  # the tokens are there, or making them would import torch
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
