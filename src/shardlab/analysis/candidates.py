"""The candidates that `shardlab plan` is asked about: one, or with -m each combination of comma-separated values."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shardlab.analysis.plan import Plan, plan_of
from shardlab.config.check import settle
from shardlab.config.combinations import combinations
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
    varied, jobs = combinations(overrides, config_dir)
    candidates = []
    for job in jobs:
        what = " ".join(word for word in job if word.partition("=")[0] in varied)
        try:
            candidates.append(Candidate(what, plan_one(list(job), config_dir)))
        except ShardlabError as error:
            candidates.append(Candidate(what, str(error)))
    return candidates


def _meta(dataset: DatasetConfig, global_batch: int) -> Meta:
    """What the prepared data is; prepared now, with a word, if it isn't."""
    if not is_whole(seek(dataset).folder):
        tell(f"preparing dataset {dataset.name}, once", sys.stderr)
    return read_meta(prepare(dataset, global_batch=global_batch))
