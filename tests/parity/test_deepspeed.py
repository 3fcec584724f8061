"""DeepSpeed's ZeRO trains the same losses as ours, on two ranks without a GPU: an implementation that isn't ours.

DeepSpeed is no dependency. To have these tests: pip install deepspeed (0.19.8 was tried).
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from trained import train

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks

HARNESS = Path(__file__).parents[2] / "benchmarks" / "deepspeed"


def _is_missing() -> bool:
    try:
        version("deepspeed")  # a folder of this name could be imported, as a namespace
    except PackageNotFoundError:
        return True
    return False


pytestmark = pytest.mark.skipif(_is_missing(), reason="DeepSpeed isn't installed; pip install deepspeed would do")

SMALL = ["seed=3", "model=tiny", "model.n_layers=2", "model.d_model=16", "model.d_ff=32", "model.dropout=0.2"]
STEPS = ["trainer.steps=5", "trainer.global_batch=13", "trainer.micro_batches=4", "trainer.clip=0.1"]
COMMON = [*SMALL, *STEPS, "trainer.eval_batches=1", "runtime.device=cpu", "ranks=2"]
TASKS = {
    "language model": ["dataset=pydoc", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.kwargs.momentum=0.9"],
    "tied": ["dataset=pydoc", "optimizer=adamw", "model.tie=true", "model.positions=learned", "model.norm=pre"],
    "classifier": ["dataset=synthetic", "dataset.task=classifier", "optimizer=adamw", "optimizer.lr=1e-3"],
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("task", TASKS)
def test_the_same_losses_as_deepspeeds_zero(task, stage, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HARNESS)  # ranks look for modules where this process does
    overrides = [*COMMON, *TASKS[task]]
    ours = train(tmp_path / "ours", [*overrides, f"strategy=zero{stage}"])
    config = check(compose([*overrides, "strategy=ddp", "runtime.threads=1"]).config)
    theirs = run_ranks("by_deepspeed:train", (config, prepare(config.dataset), stage), 2, log_dir=tmp_path)[0]
    assert max(theirs.norms) > 0.1, "the clip must bite"
    for mine, its in ((ours.column("loss"), theirs.losses), (ours.column("grad_norm"), theirs.norms)):
        apart = [abs(a - b) / abs(a) for a, b in zip(mine, its, strict=True)]
        assert len(apart) == 5
        assert apart[0] < 1e-5
        assert max(apart) < 1e-4
