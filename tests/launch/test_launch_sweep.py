"""A sweep's end is written whatever ends it, and a signal between its jobs is not lost."""

import json
import threading
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from launch_parts import composed, ended, job_of, stand_in, sweep_of
from launch_processes import LIGHT, Launcher
from omegaconf import DictConfig

from shardlab.cli import main
from shardlab.launch import run as run_module
from shardlab.sweeps import books, jobs
from shardlab.tracking.store import Store

CODE = """
import os, signal, sys, time
from launch_parts import stand_in
from shardlab.cli import main
from shardlab.launch import run
from shardlab.sweeps import books, jobs
stand_in(run)

def struck(function):
    def strike(*arguments, **keywords):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # until the main thread has noticed
        return function(*arguments, **keywords)
    return strike

moment, fault = sys.argv[1:]
if moment == "between jobs":
    jobs.of_record = struck(jobs.of_record)
elif moment == "at the end":
    books.end_sweep = struck(books.end_sweep)
words = ["strategy=ddp", "tracking=none", "hydra.sweep.dir=all", f"model.name={fault}", "seed=1,2"]
sys.exit(main(["train", "-m", *words]))
"""

ENDS = [
    # moment of SIGTERM   rank 1 meets    exit status   sweep's status   jobs finished, failed, refused
    ("none", "none", 0, "FINISHED", (2, 0, 0)),
    ("none", "user error", 1, "FAILED", (0, 2, 0)),
    ("between jobs", "none", 143, "KILLED", (1, 0, 0)),
    ("at the end", "none", 143, "FINISHED", (2, 0, 0)),
]


@pytest.mark.parametrize(("moment", "fault", "exit_status", "status", "counts"), ENDS)
def test_the_end_of_a_sweep_is_written(
    tmp_path: Path, moment: str, fault: str, exit_status: int, status: str, counts: tuple[int, int, int]
) -> None:
    launcher = Launcher(LIGHT + CODE, tmp_path, moment, fault)
    try:
        assert launcher.end(seconds=60) == exit_status, launcher.output
    finally:
        launcher.kill()
    about = json.loads((tmp_path / "all" / "sweep.json").read_text())
    assert about["status"] == status
    assert tuple(about["metrics"][f"sweep/jobs_{end}"] for end in ("finished", "failed", "refused")) == counts


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAIN_RANK", "prepare"):
        monkeypatch.setattr(run_module, name, getattr(run_module, name))
    stand_in(run_module)


@pytest.mark.usefixtures("_stand_in")
def test_a_job_that_comes_too_late_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra makes a job's folder before the sweep hears of the job: after a failure it once stayed, empty."""
    hear = jobs.SweepJobs._run

    def late(self: jobs.SweepJobs, cfg: DictConfig) -> object:
        if HydraConfig.get().job.num == 1:
            self.stop.pull("job 0 failed")
        return hear(self, cfg)

    monkeypatch.setattr(jobs.SweepJobs, "_run", late)
    main(["train", "-m", "strategy=ddp", "model.name=none", "tracking=none", "hydra.sweep.dir=all", "seed=1,2"])
    assert not Path("all/1").exists()


@pytest.mark.usefixtures("_stand_in")
def test_a_signal_ends_the_wait_for_a_slow_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, answered = sweep_of("all"), threading.Event()
    run_module.run(composed("none", "run_dir=all/0"), job=job_of(sweep, 0))
    ended(sweep, 0)
    monkeypatch.setattr(books, "patience", lambda store: 120)
    monkeypatch.setattr(books, "end_sweep", lambda *_: [Store("http://slow", "e")])
    monkeypatch.setattr(books, "ship_sweep", lambda *_: answered.wait(20))
    assert sweep.finish(sweep.rows.read(), give_up=lambda: True) == "FINISHED"
    assert not answered.is_set()
    assert "MLflow has not answered yet; to ship the sweep's end later" in capsys.readouterr().err
    answered.set()
