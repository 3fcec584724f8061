"""What a command with -m asks for, found out before Hydra composes a job: where, over what, how many at once."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from shardlab.config.check import Share, visible_gpus
from shardlab.config.compose import composing, to_config
from shardlab.config.objectives import check_objective, names_of
from shardlab.config.strategies import at_least, is_classifier
from shardlab.errors import ShardlabError
from shardlab.parallel.mesh import mesh_of
from shardlab.sweeps.books import about_sweep, space_of
from shardlab.sweeps.slots import slots


@dataclass(frozen=True)
class Plan:
    """What every job of a sweep must know, in whichever process it runs.

    folder: the sweep's; about: see books.py
    varied: the keys that take several values; total: the number of jobs, None if only the sweeper knows
    parallel: jobs at the same time; ranks: the most that any job uses; tracked: MLflow shows the runs
    """

    folder: Path
    about: dict[str, Any]
    varied: tuple[str, ...]
    total: int | None
    parallel: int
    fail_fast: bool
    objectives: tuple[str, ...]
    ranks: int = 0
    tracked: bool = True

    @property
    def share(self) -> Share:
        """What one job may use of the machine."""
        return Share(max(1, len(os.sched_getaffinity(0)) // self.parallel), visible_gpus() // self.parallel, self.ranks)


def plan_of(words: list[str], overrides: list[str], compose: dict[str, Any]) -> Plan:
    """What the command asks for.

    words: after `shardlab train`; overrides: those of them that are; compose: the config's name and the user's folder
    Raises ShardlabError.
    """
    with composing(overrides, sweep=True, **compose) as cfg:
        config = to_config(cfg)
        folder = Path(cfg.hydra.sweep.dir)
        parsed = _parsed(cfg, overrides)
        jobs = BasicSweeper.split_arguments(parsed, None)[0] if _is_grid(cfg, parsed) else None
    sweeping = [override for override in parsed if override.is_sweep_override()]
    varied, several = tuple(each.key_or_group for each in sweeping), [str(each.input_line) for each in sweeping]
    settings = config.sweep
    at_least("sweep.parallel", settings.parallel, 1)
    slots(settings.parallel)
    task_varies = any(key.startswith(("dataset", "experiment")) for key in varied)
    check_objective(settings.objective, None if task_varies else is_classifier(config))
    name = compose["config_name"]
    space = space_of(overrides, None if name == "config" else name, compose["config_dir"])
    return Plan(
        folder=folder,
        about=about_sweep(["shardlab", "train", *words], space, several),
        varied=varied,
        total=None if jobs is None else len(jobs),
        parallel=settings.parallel,
        fail_fast=settings.fail_fast,
        objectives=tuple(names_of(settings.objective)),
        ranks=_most_ranks(jobs, compose) if jobs and visible_gpus() else 0,
        tracked=config.tracking.name == "mlflow",
    )


def _parsed(cfg: DictConfig, overrides: list[str]) -> list[Override]:
    """The overrides, those of hydra.sweeper.params included, with what a glob stands for."""
    params = OmegaConf.select(cfg, "hydra.sweeper.params", default=None) or {}
    loader = GlobalHydra.instance().config_loader()
    words = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    parsed = OverridesParser.create(loader).parse_overrides(words)
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group.startswith(("sweep.", "tracking.", "tracking")):
            key = override.key_or_group
            example = "; several objectives are a list: 'sweep.objective=[val/loss,perf/tokens_per_s]'"
            raise ShardlabError(
                f"{key} is one for the whole sweep; give it one value{example if key == 'sweep.objective' else ''}"
            )
    return parsed


def _is_grid(cfg: DictConfig, parsed: list[Override]) -> bool:
    """Whether Hydra's own sweeper runs, over values that can be listed. ShardlabError if it can't list them."""
    if not str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return False
    for each in parsed:
        if each.is_sweep_override() and not each.is_discrete_sweep():
            raise ShardlabError(
                f"'{each.input_line}' is an interval, from which only a search can choose: "
                "hydra/sweeper=shardlab_optuna would; without one give a list or a range()"
            )
    return True


def _most_ranks(jobs: list[list[str]], compose: dict[str, Any]) -> int:
    """The most ranks that any job of a sweep uses; `auto` takes the GPUs only if all jobs fit. jobs: overrides of each.

    Each is composed, for an experiment may choose the strategy, unless it differs from another only in what can't
    matter here. One that cannot be composed will be refused, and needs none.
    """
    most = 1
    free = ("seed=", "optimizer", "scheduler", "model.dropout=", "trainer.")
    distinct = {tuple(word for word in job if not word.startswith(free)): job for job in jobs}
    for overrides in distinct.values():
        with contextlib.suppress(ShardlabError), composing(overrides, **compose) as cfg:
            config = to_config(cfg)
            most = max(most, mesh_of(config.strategy).ranks)
    return most
