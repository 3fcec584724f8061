"""The candidates that `shardlab plan` is asked about: one, or with -m each combination of comma-separated values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from shardlab.analysis.plan import Plan, plan_of
from shardlab.config.check import settle
from shardlab.config.compose import composed_from, composing
from shardlab.config.overrides import check_folders, check_overrides
from shardlab.data.cache import is_whole
from shardlab.data.corpora import DatasetConfig
from shardlab.data.prepare import prepare, seek
from shardlab.data.prepared import Meta, read_meta
from shardlab.errors import ShardlabError
from shardlab.launch.streams import tell


@dataclass(frozen=True)
class Candidate:
    """One combination. what: the values that are its own, as text; plan: of it, or the line that refuses it"""

    what: str
    plan: Plan | str


def plan_one(overrides: list[str], config_dir: str | None = None) -> Plan:
    """The plan of a config. Raises ShardlabError."""
    check_folders(config_dir, check_overrides(overrides))
    with composing(overrides, config_dir=config_dir) as cfg:
        composed = composed_from(cfg, cfg.hydra)
    settled, notes = settle(composed, values=False)
    config = settled.config
    return plan_of(config, _meta(config.dataset, config.trainer.global_batch), notes)


def plan_many(overrides: list[str], config_dir: str | None = None) -> list[Candidate]:
    """The plan of each combination, in the order in which a sweep would run them. Raises ShardlabError if the overrides
    can't be read."""
    check_folders(config_dir, check_overrides(overrides, sweep=True))
    varied, jobs = _combinations(overrides, config_dir)
    candidates = []
    for job in jobs:
        what = " ".join(word for word in job if word.partition("=")[0] in varied)
        try:
            candidates.append(Candidate(what, plan_one(job, config_dir)))
        except ShardlabError as error:
            candidates.append(Candidate(what, str(error)))
    return candidates


def _combinations(overrides: list[str], config_dir: str | None) -> tuple[list[str], list[Any]]:
    """The keys that take several values, and the overrides of each combination, by Hydra's own grammar."""
    with composing(overrides, config_dir=config_dir, sweep=True):
        loader = GlobalHydra.instance().config_loader()  # knows what a glob stands for
        parsed = OverridesParser.create(loader).parse_overrides(overrides)
        for each in parsed:
            if each.is_sweep_override() and not each.is_discrete_sweep():
                raise ShardlabError(f"'{each.input_line}' is an interval; a plan needs a list of values or a range()")
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return [str(each.get_key_element()) for each in parsed if each.is_sweep_override()], list(jobs)


def _meta(dataset: DatasetConfig, global_batch: int) -> Meta:
    """What the prepared data is; prepared now, with a word, if it isn't."""
    if not is_whole(seek(dataset).folder):
        tell(f"preparing dataset {dataset.name}, once", sys.stderr)
    return read_meta(prepare(dataset, global_batch=global_batch))
