"""Real trainings through the command and from Python: one run, a sweep with a bad job, and what each leaves behind."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardlab.errors import ShardlabError

SHORT = ["trainer.steps=2", "trainer.eval_batches=1", "trainer.test=false", "model.n_layers=1"]
QUIET = [*SHORT, "tracking=none"]


def test_one_run_leaves_one_folder_that_says_how_it_was_made(shardlab):
    ended = shardlab("train", *QUIET, "--run", "run_dir=here/run", "ranks=2")
    assert ended.returncode == 0, ended.stderr
    assert "strategy=single runs on one rank; ranks=2 is left unused" in ended.stderr.splitlines()
    assert {path.name for path in Path().iterdir()} == {"here"}
    assert {"config.yaml", ".hydra", "events.jsonl", "provenance.json"} <= {
        file.name for file in Path("here/run").iterdir()
    }
    assert {file.name for file in Path("here/run/.hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert OmegaConf.load("here/run/.hydra/hydra.yaml").hydra.runtime.choices.model == "tiny"
    provenance = json.loads(Path("here/run/provenance.json").read_text())
    assert provenance["command"] == ["shardlab", "train", *QUIET, "--run", "run_dir=here/run", "ranks=2"]
    assert provenance["overrides"] == [*QUIET, "run_dir=here/run", "ranks=2"]
    again = shardlab("train", *QUIET, "run_dir=here/run")
    assert again.returncode == 2
    assert len(again.stderr.splitlines()) == 1


def test_the_default_folder_is_made_once(shardlab):
    """Once ${now:} was resolved twice, and an empty folder stood beside each run's."""
    assert shardlab("train", *QUIET).returncode == 0
    assert len(list(Path("runs").glob("*/*"))) == 1


def test_missing_data_leaves_no_folder(shardlab, monkeypatch):
    monkeypatch.delenv("SHARDLAB_DATA", raising=False)
    Path("empty").mkdir()
    ended = shardlab("train", *QUIET, "dataset=nsmc", "dataset.path=empty")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert {path.name for path in Path().iterdir()} == {"empty"}


def test_a_sweep_goes_on_past_a_refused_job(shardlab):
    ended = shardlab("train", "-m", *QUIET, "strategy=single,ddp", "model.n_heads=4,5", "hydra.sweep.dir=all")
    assert ended.returncode == 1, ended.stderr
    assert "job 1 refused: model.n_heads=5 does not divide model.d_model=64; 1, 2, 4 or 8 would" in ended.stderr
    table = [line.split() for line in ended.stdout.splitlines() if line.startswith("    ")]
    assert [(row[0], row[1], row[3]) for row in table] == [
        ("0", "strategy=single", "finished"),
        ("1", "strategy=single", "refused"),
        ("2", "strategy=ddp", "finished"),
        ("3", "strategy=ddp", "refused"),
    ]
    assert {path.name for path in Path("all").iterdir() if path.is_dir()} == {"0", "2"}
    compared = shardlab("compare", "all")
    assert compared.returncode == 0, compared.stderr
    assert "single" in compared.stdout
    assert "ddp2" in compared.stdout


def test_a_sweep_goes_on_past_a_failed_job_and_ends_with_1(monkeypatch, capfd):
    from shardlab.cli import main
    from shardlab.launch import jobs
    from shardlab.launch import run as launch

    def run(composed, *, job=None, hydra=None):
        """The launcher, of which every second job is broken by a bug of ours."""
        if composed.config.seed == 2:
            raise RuntimeError("a bug")
        return real(composed, job=job, hydra=hydra)

    real = launch.run
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(jobs, "best_loss", lambda record: losses.append(record.best["loss"]))
    losses: list[float] = []
    assert main(["train", "-m", *QUIET, "seed=1,2,3"]) == 1
    assert len(losses) == 2
    captured = capfd.readouterr()
    assert "job 1 failed: RuntimeError: a bug" in captured.err
    assert "2 finished" in captured.out


@pytest.mark.parametrize("words", [["seed=1,2", "trainer.stepz=3"], ["model=tiny,smal"]])
def test_a_sweep_that_cannot_be_composed_leaves_nothing(words, shardlab):
    ended = shardlab("train", "-m", *QUIET, *words)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert list(Path().iterdir()) == []


def test_a_job_whose_folder_holds_a_run_is_refused(capfd):
    """Once it was called failed, because there was a folder."""
    from shardlab.cli import main

    for job in "01":
        Path("all", job).mkdir(parents=True)
        Path("all", job, "events.jsonl").touch()
    before = sorted(Path().rglob("*"))
    assert main(["train", "-m", *QUIET, "seed=1,2", "hydra.sweep.dir=all"]) == 2
    assert "job 1 refused: run_dir=all/1 already holds a run" in capfd.readouterr().err
    assert sorted(Path().rglob("*")) == before


DEVICES = [
    # the sweep's words                                         devices of its jobs, where there is one GPU
    (["seed=1,2"], ["cuda", "cuda"]),
    (["strategy=single,ddp"], ["cpu", "cpu"]),
    (["strategy=glob(*)"], ["cpu"] * 5),  # hybrid is refused: it needs four ranks
    (["strategy=ddp", "ranks=1,2"], ["cpu", "cpu"]),
    (["strategy=ddp", "ranks=1", "seed=1,2"], ["cuda", "cuda"]),
    (["experiment=mine,demo", "--config-dir", "own"], ["cpu", "cpu"]),
    (["strategy=single,ddp", "runtime.device=cpu"], ["cpu", "cpu"]),
]


@pytest.mark.parametrize(("words", "devices"), DEVICES)
def test_a_sweep_takes_the_gpus_if_every_job_fits(words, devices, monkeypatch):
    from shardlab.cli import main
    from shardlab.launch import run as launch

    def run(composed, *, job=None, hydra=None):
        taken.append(composed.config.runtime.device.name)
        raise ShardlabError("enough seen")

    taken: list[str] = []
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr("shardlab.config.check.visible_gpus", lambda: 1)
    Path("own/experiment").mkdir(parents=True)
    Path("own/experiment/mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /strategy: ddp\n")
    assert main(["train", "-m", *words]) == 2
    assert taken == devices


def test_interrupt_ends_the_whole_sweep(monkeypatch, capfd):
    from shardlab.cli import main
    from shardlab.launch import run as launch

    seeds = []

    def run(composed, *, job=None, hydra=None):
        seeds.append(composed.config.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", run)
    assert main(["train", "-m", *QUIET, "seed=1,2,3"]) == 130
    assert seeds == [1]


def test_train_from_a_script_without_a_main_guard():
    Path("script.py").write_text(
        textwrap.dedent(
            f"""
            import shardlab
            record = shardlab.train({[*QUIET, "strategy=ddp", "ranks=2"]!r})
            print("STATUS", record.status, len(record.losses), isinstance(record, shardlab.RunRecord))
            try:
                shardlab.train(["trainer.stepz=3"])
            except shardlab.ShardlabError as error:
                print("REFUSED", error)
            print("FAILED", shardlab.RunFailed.__name__, (record.folder / ".hydra/hydra.yaml").exists())
            """
        )
    )
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if line.startswith(("STATUS", "REFUSED", "FAILED"))]
    assert said == [
        "STATUS FINISHED 2 True",
        "REFUSED unknown key 'trainer.stepz'; did you mean 'trainer.steps'?",
        "FAILED RunFailed True",
    ]
