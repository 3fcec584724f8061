"""Every family has faults that were planted in its ranks: parity must see each, or it proves nothing."""

from __future__ import annotations

import pytest
from faults import DATA_FAULTS, FAULTS
from trained import Trained, difference, train

# What the faults change shows within a few steps; the model is small, since what could differ is not in the size.
BASE = ["seed=3", "model=tiny", "model.n_layers=2", "model.d_model=16", "model.d_ff=32", "model.dropout=0.2"]
BASE += ["trainer.steps=4", "trainer.eval_batches=1", "trainer.global_batch=13", "trainer.micro_batch=4"]
BASE += ["trainer.clip=0.1", "precision=fp64"]
LANGUAGE = ["dataset=pydoc", "optimizer=sgd", "optimizer.lr=0.5", "optimizer.kwargs.momentum=0.9"]
CLASSES = ["dataset=synthetic", "dataset.task=classifier", "optimizer=adamw", "optimizer.lr=1e-3"]
TIED = [*LANGUAGE, "model.tie=true"]
SEEN = 1e-5
"""The least difference that counts: 10,000 times what may be between two meshes in fp64."""

DDP, PIPELINE, TENSOR = (["ranks=2", f"strategy={name}"] for name in ("ddp", "pipeline", "tensor"))
ZERO1, ZERO2, ZERO3 = (["ranks=2", f"strategy=zero{level}"] for level in (1, 2, 3))
RING = ["strategy=ddp", "ranks=3", "strategy.reduce=ring"]
HYBRID = ["strategy=hybrid", "ranks=4", "strategy.tensor=1"]
HYBRID_ZBV = [*HYBRID, "strategy.replicate=2", "strategy.schedule=zbv"]
PLANTED = [
    # fault, strategy, task
    *((fault.__name__, DDP, (LANGUAGE, CLASSES)[n % 2]) for n, fault in enumerate(DATA_FAULTS)),
    ("skip_f", TENSOR, LANGUAGE),
    ("bias_on_every_rank", TENSOR, CLASSES),
    ("fan_of_the_shard", TENSOR, LANGUAGE),
    ("masks_of_the_first_slice", TENSOR, LANGUAGE),
    ("count_padded_words", ["strategy=tensor", "ranks=4"], LANGUAGE),
    ("count_replicated_twice", TENSOR, LANGUAGE),
    ("swap_two_targets", PIPELINE, CLASSES),
    ("swap_two_activations", [*PIPELINE, "strategy.schedule=gpipe"], LANGUAGE),
    ("stale_activations", [*PIPELINE, "strategy.schedule=interleaved_1f1b"], LANGUAGE),
    ("drop_a_gradient_on_the_way", [*PIPELINE, "strategy.schedule=looped_bfs"], LANGUAGE),
    ("hooks_of_data_parallelism", HYBRID_ZBV, LANGUAGE),
    ("hooks_of_data_parallelism", [*HYBRID_ZBV, "strategy.schedule=interleaved_zero_bubble"], CLASSES),
    ("forget_what_was_put_off", [*PIPELINE, "strategy.schedule=dualpipev", "trainer.micro_batch=2"], LANGUAGE),
    ("clip_per_stage", PIPELINE, LANGUAGE),
    ("count_a_tied_gradient_twice", PIPELINE, TIED),
    ("leave_a_tied_gradient_alone", PIPELINE, TIED),
    ("sum_a_tied_gradient_twice", PIPELINE, TIED),
    ("take_the_next_piece", ZERO3, LANGUAGE),
    ("keep_the_last_micro_batch", ZERO2, LANGUAGE),
    ("keep_the_update", ZERO1, LANGUAGE),
    ("forget_the_copies", [*HYBRID, "strategy.pipeline=1", "strategy.shard=2", "strategy.replicate=2"], LANGUAGE),
    ("free_too_late", ZERO3, LANGUAGE),
    ("add_a_chunk_twice", RING, LANGUAGE),
    ("miss_a_turn", RING, LANGUAGE),
]
_references: dict[tuple[str, ...], Trained] = {}


def one_process(tmp_path_factory, task: list[str]) -> Trained:
    """The run without ranks or faults, trained once."""
    key = tuple(task)
    if key not in _references:
        folder = tmp_path_factory.mktemp("single") / "run"
        _references[key] = train(folder, [*BASE, *task, "strategy=single"])
    return _references[key]


@pytest.mark.parametrize(("fault", "strategy", "task"), PLANTED)
def test_a_planted_fault_is_caught(fault, strategy, task, tmp_path, tmp_path_factory):
    broken = train(tmp_path / "run", [*BASE, *task, *strategy], fault)
    assert difference(one_process(tmp_path_factory, task), broken) > SEEN


SOUND = {(*strategy, *task): (strategy, task) for _, strategy, task in PLANTED}


@pytest.mark.parametrize(("strategy", "task"), SOUND.values())
def test_without_a_fault_the_same_case_passes(strategy, task, tmp_path, tmp_path_factory):
    """So that it is the fault that is seen."""
    assert difference(one_process(tmp_path_factory, task), train(tmp_path / "run", [*BASE, *task, *strategy])) < 1e-9


def test_every_fault_is_planted():
    assert {fault for fault, *_ in PLANTED} == FAULTS.keys()
