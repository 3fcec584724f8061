"""Real trainings through the command and from Python: one run, a sweep with a bad job, and what each leaves behind."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conftest import Command
from shardlab.config.overrides import packaged_choices
from shardlab.errors import ShardlabError

SHORT = ["trainer.steps=2", "trainer.eval_batches=1", "trainer.test=false", "model.n_layers=1"]
QUIET = [*SHORT, "tracking=none"]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Command:
    """As the fixture `shardlab`, but in this process, whose fork server has torch loaded."""
    from shardlab.cli import main

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        status = main(list(words))
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


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


def test_the_default_folder_is_made_once(here):
    """Once ${now:} was resolved twice, and an empty folder stood beside each run's."""
    assert here("train", *QUIET).returncode == 0
    assert len(list(Path("runs").glob("*/*"))) == 1


def test_missing_data_leaves_no_folder(shardlab, monkeypatch):
    monkeypatch.delenv("SHARDLAB_DATA", raising=False)
    Path("empty").mkdir()
    ended = shardlab("train", *QUIET, "dataset=nsmc", "dataset.path=empty")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert {path.name for path in Path().iterdir()} == {"empty"}


def rows(folder="all"):
    """(number, what, status, reason) of each job of a sweep."""
    lines = [json.loads(line) for line in Path(folder, "jobs.jsonl").read_text().splitlines()]
    last = {line["number"]: line for line in lines}
    return [(n, last[n]["what"], last[n]["status"], last[n]["reason"]) for n in sorted(last)]


def test_a_sweep_goes_on_past_a_refused_job(here):
    ended = here("train", "-m", *QUIET, "strategy=single,ddp", "model.n_heads=4,5", "hydra.sweep.dir=all")
    assert ended.returncode == 1, ended.stderr
    why = "model.n_heads=5 does not divide model.d_model=64; 1, 2, 4 or 8 would"
    assert f"job 1 refused: {why}" in ended.stderr
    assert rows() == [
        (0, "strategy=single model.n_heads=4", "finished", ""),
        (1, "strategy=single model.n_heads=5", "refused", why),
        (2, "strategy=ddp model.n_heads=4", "finished", ""),
        (3, "strategy=ddp model.n_heads=5", "refused", why),
    ]
    assert f"1  strategy=single model.n_heads=5  refused          -        -  {why}" in ended.stdout
    assert "best: job" in ended.stdout
    assert {path.name for path in Path("all").iterdir() if path.is_dir()} == {"0", "2"}
    compared = here("compare", "all")
    assert compared.returncode == 0, compared.stderr
    assert "single" in compared.stdout
    assert "ddp2" in compared.stdout


def test_a_sweep_goes_on_past_a_failed_job_and_ends_with_1(monkeypatch, capfd):
    from shardlab.cli import main
    from shardlab.launch import run as launch

    def run(composed, **keywords):
        """The launcher, of which every second job is broken by a bug of ours."""
        if composed.config.seed == 2:
            raise RuntimeError("a bug")
        return real(composed, **keywords)

    real = launch.run
    monkeypatch.setattr(launch, "run", run)
    assert main(["train", "-m", *QUIET, "seed=1,2,3", "hydra.sweep.dir=all"]) == 1
    captured = capfd.readouterr()
    assert "job 1 failed: RuntimeError: a bug" in captured.err
    assert 'raise RuntimeError("a bug")' in captured.err
    assert "1 failed, 2 finished" in captured.out
    assert [row[2] for row in rows()] == ["finished", "failed", "finished"]


@pytest.mark.parametrize("words", [["seed=1,2", "trainer.stepz=3"], ["model=tiny,smal"]])
def test_a_sweep_that_cannot_be_composed_leaves_nothing(words, shardlab):
    ended = shardlab("train", "-m", *QUIET, *words)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert list(Path().iterdir()) == []


def test_a_job_whose_folder_holds_a_run_takes_one_beside_it():
    from shardlab.cli import main

    Path("all/0").mkdir(parents=True)
    Path("all/0/events.jsonl").touch()
    assert main(["train", "-m", *QUIET, "seed=1,2", "hydra.sweep.dir=all"]) == 0
    assert Path("all/0/events.jsonl").read_text() == ""
    assert {path.name for path in Path("all").iterdir() if path.is_dir()} == {"0", "0-2", "1"}


GRID = """
# @package _global_
defaults:
  - override /dataset: synthetic
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      seed: range(1,3)
"""


def test_an_experiment_can_be_a_sweep(here):
    Path("own/experiment").mkdir(parents=True)
    Path("own/experiment/grid.yaml").write_text(GRID)
    words = ["experiment=grid", "--config-dir", "own", *QUIET, "optimizer.lr=0.1,0.2", "hydra.sweep.dir=all"]
    ended = here("train", *words)
    assert ended.returncode == 0, ended.stderr
    whats = [f"optimizer.lr={lr} seed={seed}" for seed in (1, 2) for lr in (0.1, 0.2)]
    assert sorted(" ".join(sorted(row[1].split())) for row in rows()) == sorted(whats)
    again = here("train", *words)
    assert again.returncode == 0
    assert again.stdout.count("finished by an earlier call") == 4


def test_a_sweep_of_another_kind_is_not_gone_on_with(here):
    assert here("train", "-m", *QUIET, "seed=1,2", "hydra.sweep.dir=all").returncode == 0
    other = here("train", "-m", *QUIET, "seed=1,3", "hydra.sweep.dir=all")
    assert other.returncode == 2
    assert len(other.stderr.splitlines()) == 1
    assert "/all already holds another sweep; give another folder, or none for a new one" in other.stderr


DEVICES = [
    # the sweep's words                                         devices of its jobs, where there is one GPU
    (["seed=1,2"], ["cuda", "cuda"]),
    (["strategy=single,ddp"], ["cpu", "cpu"]),
    (["strategy=glob(*)"], ["cpu"] * (len(packaged_choices("strategy")) - 1)),  # hybrid is refused: it needs four ranks
    (["strategy=ddp", "ranks=1,2"], ["cpu", "cpu"]),
    (["strategy=ddp", "ranks=1", "seed=1,2"], ["cuda", "cuda"]),
    (["experiment=mine,demo", "--config-dir", "own"], ["cpu", "cpu"]),
    (["strategy=single,ddp", "runtime.device=cpu"], ["cpu", "cpu"]),
]


@pytest.mark.parametrize(("words", "devices"), DEVICES)
def test_a_sweep_takes_the_gpus_if_every_job_fits(words, devices, monkeypatch):
    from shardlab.cli import main
    from shardlab.launch import run as launch

    def run(composed, **keywords):
        taken.append(composed.config.runtime.device.name)
        raise ShardlabError("enough seen")

    taken: list[str] = []
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr("shardlab.config.check.gpu_names", lambda: ("0",))
    Path("own/experiment").mkdir(parents=True)
    Path("own/experiment/mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /strategy: ddp\n")
    assert main(["train", "-m", *words]) == 2
    assert taken == devices


def test_interrupt_ends_the_whole_sweep(monkeypatch, capfd):
    from shardlab.cli import main
    from shardlab.launch import run as launch

    seeds = []

    def run(composed, **keywords):
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


SWEEPS = [["-m", "seed=1,2"], ["hydra.mode=MULTIRUN", "seed=1"]]


@pytest.mark.parametrize("overrides", SWEEPS)
def test_train_from_python_says_that_it_runs_one_config(overrides):
    """Once the advice was to add -m, and hydra.mode was taken in silence."""
    import shardlab

    with pytest.raises(ShardlabError, match="runs one config; for several call it for each"):
        shardlab.train([*QUIET, *overrides])
    assert list(Path().iterdir()) == []
