"""A whole search: check everything, open the study, run the trials, leave the results."""

import sys
from pathlib import Path
from typing import Any

import optuna
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from optuna.exceptions import StorageInternalError

from hydra_plugins.shardlab_optuna._pictures import draw
from hydra_plugins.shardlab_optuna._space import Space, space_of
from hydra_plugins.shardlab_optuna._study import check_keys, counted, open_study
from hydra_plugins.shardlab_optuna._trials import JOB, Trials
from hydra_plugins.shardlab_optuna.sweeper import OptunaConf
from shardlab.config.compose import to_config
from shardlab.config.identity import config_hash
from shardlab.config.objectives import check_objective, goes_up, names_of
from shardlab.config.strategies import is_classifier
from shardlab.errors import ShardlabError
from shardlab.launch.streams import tell
from shardlab.tracking.provenance import without_credentials

RESULTS = "optimization_results.yaml"
"""As the sweeper of Hydra's own for Optuna calls it, with the same keys."""


def sweep(keys: OptunaConf, words: list[str], config: DictConfig, loader: ConfigLoader, launcher: Launcher) -> None:
    """Search, or go on with a search.

    words: the overrides; config: composed without those that are searched; loader: composes a job's
    Leaves study.db, multirun.yaml, optimization_results.yaml, history.png and importance.png in the sweep's folder.
    Raises ShardlabError before the first job.
    """
    space = space_of(OverridesParser.create(loader).parse_overrides(words))
    # What is wrong with every job, or with a name, is said here, once; what doesn't go together is a refused job.
    jobs = [to_config(loader.load_sweep_config(config, sample)) for sample in space.samples]
    job = jobs[0]
    check_objective(job.sweep.objective, is_classifier(job))
    objectives = names_of(job.sweep.objective)
    check_keys(keys, space, objectives, can_stop=hasattr(launcher, "submit"))

    folder = Path(config.hydra.sweep.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "multirun.yaml").write_text(without_credentials(OmegaConf.to_yaml(config)), encoding="utf-8")
    except OSError as error:
        raise ShardlabError(f"hydra.sweep.dir={folder} can't be written: {error.strerror or error}") from error
    about = {
        "objective": objectives,
        "searched values": {name: key.text for name, key in space.keys.items()},
        "fixed values": config_hash(job),
    }
    study = open_study(keys, folder, [goes_up(name) for name in objectives], about)
    seed = abs(job.seed) if keys.seed is None else keys.seed
    trials = Trials(study, space, objectives, folder, sampler=keys.sampler, seed=seed, prunes=keys.pruner != "none")
    try:
        trials.end_running(everywhere=keys.storage is None)
        missing = keys.n_trials - counted(study)
        if missing <= 0:
            tell(
                f"the study has {counted(study)} trials and hydra.sweeper.n_trials={keys.n_trials}: nothing to run",
                sys.stderr,
            )
        try:
            trials.run(max(missing, 0), launcher, job.sweep.parallel)
        finally:
            _finish(study, space, objectives, folder)
    except StorageInternalError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise ShardlabError(f"the study {study.study_name} can't be written: {without_credentials(cause)}") from error


def _finish(study: optuna.Study, space: Space, objectives: list[str], folder: Path) -> None:
    """Leave the results. What goes wrong here costs a line, not the search."""
    try:
        if best := best_jobs(study, space):
            OmegaConf.save(_results(best), folder / RESULTS)
        draw(study, objectives, folder)
    except Exception as error:
        tell(f"warning: no results of the search: {type(error).__name__}: {error}".splitlines()[0], sys.stderr)


def best_jobs(study: optuna.Study, space: Space) -> list[dict[str, Any]]:
    """The jobs that no other beats, each with `job`, `params` and `values`; for several objectives the Pareto front."""
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    front = [] if not complete else [study.best_trial] if len(study.directions) == 1 else study.best_trials
    return [
        {
            "job": trial.user_attrs.get(JOB, trial.number),
            "params": dict(space.values(trial.params)),
            "values": list(trial.values),
        }
        for trial in sorted(front, key=lambda trial: trial.number)
    ]


def _results(best: list[dict[str, Any]]) -> DictConfig:
    if len(best[0]["values"]) > 1:
        return OmegaConf.create({"name": "optuna", "solutions": best})
    [job] = best
    return OmegaConf.create(
        {"name": "optuna", "best_job": job["job"], "best_params": job["params"], "best_value": job["values"][0]}
    )
