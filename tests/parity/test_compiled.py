"""torch.compile: a run whose layers are compiled trains the same numbers as an eager one, on each axis and on all.

What is compiled stays in torch's cache: the first case pays for the others, and a second session finds all of it.
"""

from __future__ import annotations

import shutil

import pytest
from trained import Trained, difference, evaluation, train

SMALL = [
    "seed=3",
    "model=tiny",
    "model.n_layers=2",
    "model.d_model=16",
    "model.d_ff=32",
    "model.dropout=0.2",
    "dataset=pydoc",
    "precision=fp64",
    "trainer.global_batch=12",
    "trainer.micro_batch=4",
    "trainer.clip=0.1",
    "trainer.steps=3",
    "trainer.eval_batches=2",
    "optimizer=sgd",
    "optimizer.lr=0.5",
]
ZBV, SLICES = ["strategy.schedule=zbv"], ["strategy.sequence_parallel=true"]
BUT_LAST = ["strategy.activation_checkpoint=except_last"]
CASES = [
    ["strategy=single"],
    ["strategy=ddp", "ranks=2"],
    ["strategy=zero2", "ranks=2"],
    ["strategy=zero3", "ranks=2"],
    ["strategy=pipeline", "ranks=2"],
    ["strategy=pipeline", "ranks=2", *ZBV],
    ["strategy=tensor", "ranks=2"],
    ["strategy=hybrid", "ranks=8", "strategy.shard=2", *ZBV, *SLICES, *BUT_LAST],
]
TOLERANCE = 1e-9

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of one process that the others are held against."""
    return train(tmp_path_factory.mktemp("single") / "run", [*SMALL, "strategy=single"])


@pytest.mark.parametrize("strategy", CASES, ids=" ".join)
def test_compiled_layers_train_as_eager_ones(strategy, eager, tmp_path):
    run = train(tmp_path / "run", [*SMALL, *strategy, "runtime.compile=true"])
    assert difference(eager, run) < TOLERANCE
    for one, other in zip(*(evaluation(record) for record in (eager, run)), strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
