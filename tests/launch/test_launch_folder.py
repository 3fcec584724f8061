"""A folder that can't be had costs one line that names the key, and leaves nothing."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_parts import composed, job_of, stand_in, sweep_of

from shardlab.cli import main
from shardlab.config.compose import compose
from shardlab.errors import ShardlabError
from shardlab.launch import folder as folder_module
from shardlab.launch import run as run_module
from shardlab.launch.folder import run_name
from shardlab.launch.new_folder import new_folders
from shardlab.launch.run import RunFailed, run
from shardlab.tracking.provenance import launcher
from shardlab.tracking.record import EventLog


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAIN_RANK", "prepare"):
        monkeypatch.setattr(run_module, name, getattr(run_module, name))
    stand_in(run_module)


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


IMPOSSIBLE = ["x" * 256, "/".join(["x" * 200] * 25), "file", "file/below", "loop/below", "loop"]


@pytest.mark.parametrize("folder", IMPOSSIBLE)
@pytest.mark.parametrize("words", [["run_dir={}"], ["-m", "seed=1,2", "hydra.sweep.dir={}"]])
def test_a_folder_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], folder: str, words: list[str]) -> None:
    Path("file").touch()
    Path("loop").symlink_to("loop")
    key = words[-1].partition("=")[0]
    assert main(["train", "tracking=none", *[word.format(folder) for word in words]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{key}={folder[:20]}")


@pytest.mark.parametrize("folder", IMPOSSIBLE)
def test_a_folder_that_cannot_be_is_refused_from_python(folder: str) -> None:
    Path("file").touch()
    Path("loop").symlink_to("loop")
    made = composed()
    with pytest.raises(ShardlabError, match=r"^run_dir="):
        run(replace(made, config=replace(made.config, run_dir=folder)))


def test_a_link_into_nowhere_is_not_written_through(tmp_path: Path) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardlabError, match=r"holds config\.yaml"):
        run(composed())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_disk_that_is_full_at_the_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    if there:
        Path("run").mkdir()
    made = composed()
    monkeypatch.setattr(folder_module.OmegaConf, "to_yaml", full)  # of hydra.yaml, the last file
    with pytest.raises(ShardlabError, match="run_dir=run can't be written: No space"):
        run(made, hydra={"job": {}})  # type: ignore[arg-type]
    assert Path("run").exists() == there
    assert not there or not list(Path("run").iterdir())


@pytest.mark.parametrize(("fault", "reason"), [("none", ""), ("kill", r"rank 1 was killed by SIGKILL .*; ")])
def test_a_disk_that_is_full_at_the_end_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, reason: str
) -> None:
    monkeypatch.setattr(EventLog, "write", full)
    with pytest.raises(RunFailed, match=f"{reason}the record's end can't be written: No space left on device"):
        run(composed(fault))
    assert capsys.readouterr().out.startswith(f"{fault}-ddp2-s1: 4 steps are in the record, and no end")


def test_of_two_sweeps_at_once_in_one_folder_the_second_is_refused() -> None:
    first, second = (sweep_of("sweep", ["shardlab", "train", "-m", f"seed={seed},9"]) for seed in (1, 2))
    first.begin()
    first.begin()
    with pytest.raises(ShardlabError, match=r"hydra\.sweep\.dir=\S+ holds another sweep"):
        second.begin()
    assert not second.begun
    assert "seed=1,9" in json.loads(Path("sweep/sweep.json").read_text())["command"]


def test_a_sweep_on_a_full_disk_still_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_of("sweep")
    sweep.begin()
    monkeypatch.setattr("shardlab.tracking.sweep_parent.write_sweep", full)
    assert sweep.finish(sweep.rows.read()) == "FINISHED"
    assert "the sweep's end can't be written: No space" in capsys.readouterr().err


NAMES = [
    # overrides of the config                    those that are the job's own                  name
    (["strategy=ddp", "seed=2"], "", "tiny-ddp2-s2"),
    (["strategy=ddp", "seed=2"], "strategy=ddp seed=2 ranks=2", "tiny-ddp2-s2"),
    (["strategy=pipeline_naive"], "strategy=pipeline_naive model=tiny", "tiny-pipeline2-naive-s1"),
    (["strategy=pipeline"], "strategy=mine model=wide", "tiny-pipeline2-s1 strategy=mine model=wide"),
    (["strategy=hybrid"], "strategy.tensor=2 ++strategy.pipeline=2", "tiny-pipeline2-tensor2-s1"),
    (
        [],
        "optimizer.lr=0.1 +optimizer.kwargs.betas=[0.9, 0.95]",
        "tiny-single-s1 optimizer.lr=0.1 +optimizer.kwargs.betas=[0.9, 0.95]",
    ),
    (["tracking.run_name=mine"], "seed=2 optimizer.lr=0.1", "mine seed=2 optimizer.lr=0.1"),
    (["tracking.run_name=mine"], "tracking.run_name=mine", "mine"),
    ([], "tracking.uri=http://me:secret@host", "tiny-single-s1 tracking.uri=http://host"),
    ([], f"dataset.path={'x' * 300}", f"tiny-single-s1 dataset.path={'x' * 219}..."),
]


@pytest.mark.parametrize(("overrides", "own", "name"), NAMES)
def test_a_jobs_name_says_what_is_its_own_once(overrides: list[str], own: str, name: str) -> None:
    assert run_name(compose(overrides).config, own) == name


def test_provenance_says_which_job_of_which_sweep_a_run_is() -> None:
    sweep = sweep_of("sweep")
    made = composed("none", "run_dir=sweep/3", "optimizer.lr=0.1")
    record = run(made, job=job_of(sweep, 3, "optimizer.lr=0.1"))
    about = record.provenance
    assert (about["sweep"], about["job"], about["own_overrides"]) == (str(sweep.folder), 3, "optimizer.lr=0.1")
    assert about["config_hash"] == made.hash
    assert {key: about[key] for key in launcher()} == launcher()
    assert record.name == "none-ddp2-s1 optimizer.lr=0.1"


def test_the_folders_to_be_made_are_those_that_are_not_there(tmp_path: Path) -> None:
    assert new_folders(Path("a/b")) == [tmp_path / "a/b", tmp_path / "a"]
