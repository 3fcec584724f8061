"""The study: where it is kept, whose it is, who proposes and who prunes."""

import sqlite3
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from hydra_plugins.shardlab_optuna._space import Space
from hydra_plugins.shardlab_optuna.sweeper import OptunaConf
from shardlab.config.complaint import nearest
from shardlab.errors import ShardlabError
from shardlab.tracking.provenance import without_credentials

SAMPLERS = ("tpe", "random", "gp")
"""Not Optuna's CMA-ES: it keeps a pickle in the study and loads it, so somebody else's study could run code."""
PRUNERS = ("none", "median", "halving")
FILE, ABOUT = "study.db", "shardlab"
FIRST_RANDOM = 6
"""Trials that TPE draws at random before it begins to model."""
WAIT = 60.0
"""Seconds that a job's thread waits for another's to be done with the study's file."""


def check_keys(keys: OptunaConf, space: Space, objectives: Sequence[str], *, can_stop: bool) -> None:
    """Raise ShardlabError for a value of hydra.sweeper that is unknown or doesn't go with the rest.

    can_stop: the launcher can end a job that is pruned
    """
    if keys.n_trials < 1:
        raise ShardlabError(f"hydra.sweeper.n_trials={keys.n_trials} must be at least 1")
    if keys.seed is not None and keys.seed < 0:
        raise ShardlabError(f"hydra.sweeper.seed={keys.seed} must be at least 0, or null for the config's seed")
    for key, value, known in (("sampler", keys.sampler, SAMPLERS), ("pruner", keys.pruner, PRUNERS)):
        if value not in known:
            raise ShardlabError(
                f"unknown hydra.sweeper.{key}={value}{nearest(value, known)} (one of {', '.join(known)})"
            )
    for key, text in (("storage", keys.storage), ("study", keys.study)):
        if text is not None and not text.strip():
            raise ShardlabError(f"hydra.sweeper.{key} is empty; null takes the default")
    if keys.pruner == "none":
        return
    given = f"hydra.sweeper.pruner={keys.pruner}"
    if len(objectives) > 1:
        raise ShardlabError(f"{given} judges by one objective, not {len(objectives)}; pruner=none would do")
    if not objectives[0].startswith("val/"):
        raise ShardlabError(
            f"{given} judges by evaluations, which don't measure {objectives[0]}; pruner=none or val/loss would do"
        )
    if not can_stop:
        raise ShardlabError(f"{given} needs hydra/launcher=shardlab, for another can't end a job early")


def open_study(keys: OptunaConf, folder: Path, up: Sequence[bool], about: Mapping[str, Any]) -> optuna.Study:
    """The study, made or gone on with.

    up: for each objective, whether more of it is better
    about: what it searches; plain values, which must be the same as when the study was made
    Raises ShardlabError if it can't be opened, or is the study of something else.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)  # said of parts that every version since has kept
    name = keys.study or ("shardlab" if keys.storage is None else "/".join(folder.absolute().parts[-2:]))
    directions = [StudyDirection.MAXIMIZE if each else StudyDirection.MINIMIZE for each in up]
    where = str(folder / FILE) if keys.storage is None else without_credentials(keys.storage)
    try:
        if keys.storage is None:  # by its path, for in a URL a folder's name may hold none of ? { }
            connect = {"creator": lambda: sqlite3.connect(folder / FILE, timeout=WAIT, check_same_thread=False)}
            storage = RDBStorage("sqlite:///study.db", engine_kwargs=connect)
        else:
            storage = _shared(keys.storage)
        study = optuna.create_study(
            storage=storage, study_name=name, directions=directions, pruner=_pruner(keys), load_if_exists=True
        )
        known = study.user_attrs.get(ABOUT)
        if known is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(ABOUT, dict(about))
            return study
    except (SQLAlchemyError, OptunaError, ImportError, ValueError, RuntimeError, AssertionError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ShardlabError(f"the study {name} in {where} can't be opened: {without_credentials(lines[0])}") from error
    if known != about:
        other = ", ".join(key for key in about if known is None or known.get(key) != about[key])
        raise ShardlabError(
            f"the study {name} in {where} is of another search (its {other} differ); give another hydra.sweep.dir "
            "or hydra.sweeper.study, or the same command again"
        )
    return study


def _shared(url: str) -> RDBStorage:
    """A storage that others may be making at the same moment: then the first try of one of them fails."""
    try:
        return RDBStorage(url)
    except IntegrityError:
        time.sleep(1)
        return RDBStorage(url)


def sampler_of(name: str, seed: int, number: int) -> BaseSampler:
    """Who proposes the values of one trial.

    Its randomness is drawn from (seed, number of the trial): a search that is cut off and continued proposes what an
    unbroken one does, and a continued random search doesn't propose its first values again.
    """
    drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if name == "tpe":
        # constant_liar: proposals beside running trials keep their distance from them. multivariate: the best learning
        # rate hangs on the optimizer. Optuna's 10 random trials to begin with would be half of a usual search.
        return TPESampler(seed=drawn, constant_liar=True, multivariate=True, n_startup_trials=FIRST_RANDOM)
    if name == "gp":
        return GPSampler(seed=drawn)
    return RandomSampler(seed=drawn)


def _pruner(keys: OptunaConf) -> BasePruner:
    """Who ends hopeless trials; their time is counted in evaluations, so halving looks at the 1st, 4th, 16th, ..."""
    if keys.pruner == "median":
        return MedianPruner()
    return SuccessiveHalvingPruner(min_resource=1) if keys.pruner == "halving" else NopPruner()


def counted(study: optuna.Study) -> int:
    """The trials that count toward n_trials: a failed one has told nothing, and is not held against them."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
