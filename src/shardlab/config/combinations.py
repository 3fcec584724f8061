"""The combinations that a command line with several values for a key asks for, by Hydra's own grammar."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from shardlab.config.compose import composing
from shardlab.config.overrides import check_folders, check_overrides
from shardlab.errors import ShardlabError


def combinations(overrides: list[str], config_dir: str | None = None) -> tuple[list[str], list[Sequence[str]]]:
    """The keys that are given several values, and the overrides of each combination, in the order of a sweep.

    config_dir: the user's folder of choices. Raises ShardlabError if the overrides can't be read or listed.
    """
    check_folders(config_dir, check_overrides(overrides, sweep=True))
    with composing(overrides, config_dir=config_dir, sweep=True):
        loader = GlobalHydra.instance().config_loader()  # knows what a glob stands for
        parsed = OverridesParser.create(loader).parse_overrides(overrides)
        for each in parsed:
            if each.is_sweep_override() and not each.is_discrete_sweep():
                raise ShardlabError(f"'{each.input_line}' is an interval; list values, such as key=1,2, or a range()")
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return [str(each.get_key_element()) for each in parsed if each.is_sweep_override()], list(jobs)
