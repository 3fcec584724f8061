"""`shardlab train -m`: the command. It finds out what is to be run, takes the folder, lets Hydra go, and says the end.

The folder is fixed before Hydra composes a job: an earlier one of the same command, of which nobody else takes care
now, so that what finished there is not run again; else the one that the config names.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from shardlab.config.check import visible_gpus
from shardlab.config.compose import composing, to_config
from shardlab.config.objectives import check_objective, names_of
from shardlab.config.room import check_parallel
from shardlab.config.schema import SweepConfig
from shardlab.config.strategies import at_least, is_classifier
from shardlab.errors import ShardlabError
from shardlab.launch.new_folder import check_place, new_folders, remove_empty
from shardlab.launch.signals import Signals, Stopped
from shardlab.launch.streams import tell
from shardlab.parallel.mesh import mesh_of
from shardlab.sweeps.books import LOCK, ROOT, about_sweep, earlier_sweep, space_of
from shardlab.sweeps.jobs import Plan, SweepJobs
from shardlab.sweeps.rows import DONE, counts
from shardlab.sweeps.slots import slots
from shardlab.tracking.sweep_parent import SWEEP

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead

MULTIRUN = "multirun.yaml"
"""What Hydra's sweepers write into a sweep's folder."""


Call = Callable[[str, SweepJobs], None]


def sweep(
    words: list[str], overrides: list[str], compose: dict[str, Any], call: Call, lead: "Lead | None" = None
) -> int:
    """Run each combination; returns the exit status.

    words: after `shardlab train`; overrides: those of them that are; compose: the config's name and the user's folder
    call: calls Hydra with a folder and the jobs; lead: see hydra_app.train
    Raises ShardlabError for what can be mended before a job starts.
    """
    plan = plan_of(words, overrides, compose)
    if lead is not None:
        check_parallel(plan.parallel, lead.job.ranks)
    check_place(plan.folder, "hydra.sweep.dir")
    _refuse_others(plan.folder)
    new = new_folders(plan.folder)
    interrupted = True
    with Signals() as signals:
        jobs = SweepJobs(plan, lead)
        books = jobs.sweep
        books.claim()
        try:
            _say_resumed(jobs)
            try:
                with signals.raising(), contextlib.closing(jobs):
                    call(str(plan.folder), jobs)
                    interrupted = False
            except Stopped as stopped:
                interrupted = False
                tell(f"the sweep ends: {stopped.reason}", sys.stderr)
            except Exception:
                interrupted = False
                raise
            status = jobs.status()
        except (KeyboardInterrupt, SystemExit):
            if books.begun:
                jobs.status()
                tell("the same command goes on from here", sys.stderr)
            raise
        finally:
            seen = signals.count
            if books.begun:
                books.finish(interrupted=interrupted, give_up=lambda: signals.count > seen)
            books.release()
            if not (plan.folder / SWEEP).exists():
                for name in (MULTIRUN, LOCK):
                    (plan.folder / name).unlink(missing_ok=True)
                remove_empty(new)
    signals.check()  # one that came while the end was being written
    return status


def _refuse_others(folder: Path) -> None:
    """Raise ShardlabError if the folder holds a sweep of another application of Hydra's: its notes would be lost."""
    if (folder / MULTIRUN).exists() and not any((folder / name).exists() for name in (SWEEP, LOCK)):
        raise ShardlabError(f"hydra.sweep.dir={folder} holds another program's sweep; give another folder")


def _say_resumed(jobs: SweepJobs) -> None:
    rows = jobs.sweep.resume()
    if rows:
        jobs.reload()
        again = "" if any(row.status not in DONE for row in rows) else "; hydra.sweep.dir=FOLDER would begin anew"
        tell(f"going on with {jobs.plan.folder}: {counts(rows)}{again}", sys.stderr)


def plan_of(words: list[str], overrides: list[str], compose: dict[str, Any]) -> Plan:
    """What the command asks for. Raises ShardlabError."""
    with composing(overrides, sweep=True, **compose) as cfg:
        settings, classifier = _settings(cfg)
        folder = Path(cfg.hydra.sweep.dir)
        parsed = _parsed(cfg, overrides)
        grid = _is_grid(cfg, parsed)
        jobs = BasicSweeper.split_arguments(parsed, None)[0] if grid else None
    at_least("sweep.parallel", settings.parallel, 1)
    slots(settings.parallel)
    check_objective(settings.objective, classifier)
    space = space_of(overrides, compose["config_name"], compose["config_dir"])
    chosen = any(word.startswith("hydra.sweep.dir=") for word in overrides)
    if not chosen and folder.is_relative_to(ROOT):
        folder = earlier_sweep(space) or folder
    return Plan(
        folder=folder,
        about=about_sweep(["shardlab", "train", *words], space),
        varied=tuple(override.key_or_group for override in parsed if override.is_sweep_override()),
        total=None if jobs is None else len(jobs),
        parallel=settings.parallel,
        fail_fast=settings.fail_fast,
        objectives=tuple(names_of(settings.objective)),
        ranks=_most_ranks(jobs, compose) if jobs and visible_gpus() else 0,
    )


def _settings(cfg: DictConfig) -> tuple[SweepConfig, bool]:
    """The sweep's own keys, and whether the task is a classifier's."""
    config = to_config(cfg)
    return config.sweep, is_classifier(config)


def _parsed(cfg: DictConfig, overrides: list[str]) -> list[Override]:
    """The overrides, those of hydra.sweeper.params included, with what a glob stands for."""
    params = OmegaConf.select(cfg, "hydra.sweeper.params", default=None) or {}
    loader = GlobalHydra.instance().config_loader()
    words = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    parsed = OverridesParser.create(loader).parse_overrides(words)
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group.startswith(("sweep.", "tracking.", "tracking")):
            raise ShardlabError(f"{override.key_or_group} is one for the whole sweep; give it one value")
    return parsed


def _is_grid(cfg: DictConfig, parsed: list[Override]) -> bool:
    """Whether Hydra's own sweeper runs, over values that can be listed."""
    basic = str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper")
    return basic and all(not each.is_sweep_override() or each.is_discrete_sweep() for each in parsed)


def _most_ranks(jobs: list[list[str]], compose: dict[str, Any]) -> int:
    """The most ranks that any job of a sweep uses; `auto` takes the GPUs only if all jobs fit. jobs: overrides of each.

    Each is composed, for an experiment may choose the strategy. One that cannot be will be refused, and needs none.
    """
    most = 1
    for overrides in jobs:
        with contextlib.suppress(ShardlabError), composing(overrides, **compose) as cfg:
            config = to_config(cfg)
            most = max(most, mesh_of(config.strategy).ranks)
    return most
