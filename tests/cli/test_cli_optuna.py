"""`hydra/sweeper=shardlab_optuna` as a user meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("optuna")

SEARCH = ["train", "-m", "hydra/sweeper=shardlab_optuna", "hydra.sweep.dir=search"]
SHORT = [
    *("trainer.steps=2", "trainer.eval_every=1", "trainer.eval_batches=1", "trainer.test=false", "tracking=none"),
    *("model.n_layers=1", "model.d_model=16", "model.d_ff=16", "ranks=1"),
]

WRONG = [
    # words                                             says
    (["optimizer.lr=interval(1,0)"],                    "an interval goes from a lower number to a higher one"),
    (["optimizer.lrr=interval(0,1)"],                   "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
    (["seed=1,2", "hydra.sweeper.sampler=tpee"],        "did you mean 'tpe'?"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_what_cannot_be_ends_in_one_line_and_leaves_nothing(shardlab, words, says):
    ended = shardlab(*SEARCH, *words)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not Path("search").exists()


def test_hydra_finds_the_sweeper_and_brings_in_nothing_heavy():
    """Every command pays for what the plugins import: Hydra loads them all, whichever is chosen."""
    code = (
        "import sys\nfrom hydra.core.plugins import Plugins\nfrom hydra.plugins.sweeper import Sweeper\n"
        "names = [each.__name__ for each in Plugins.instance().discover(Sweeper)]\n"
        "print(*names, *{'optuna', 'torch', 'mlflow', 'numpy', 'matplotlib', 'sqlalchemy'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "ShardlabOptuna" in ended.stdout.split()
    assert not {"optuna", "torch", "mlflow", "numpy", "matplotlib", "sqlalchemy"} & set(ended.stdout.split())


def test_a_search_trains_and_leaves_its_results(shardlab):
    words = ["optimizer.lr=tag(log,interval(1e-4,1e-1))", "model.dropout=0.0,0.1", "hydra.sweeper.n_trials=3"]
    ended = shardlab(*SEARCH, *words, *SHORT, timeout=300)
    assert ended.returncode == 0, ended.stderr
    folder = Path("search")
    results = OmegaConf.load(folder / "optimization_results.yaml")
    best = OmegaConf.load(folder / str(results.best_job) / "config.yaml")
    assert best.optimizer.lr == results.best_params["optimizer.lr"]
    for name in ("study.db", "history.png", "multirun.yaml"):
        assert (folder / name).stat().st_size > 0
    assert "Warning" not in ended.stderr
