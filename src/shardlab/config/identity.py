"""When two configs are the same run: they differ only in where it is kept, or in how it is watched.

The hash is taken of the config as it was asked for, before `auto` and null are settled: a sweep that is continued
with other neighbours on the machine may get other threads, and is the same sweep.
"""

import hashlib
from dataclasses import replace

from omegaconf import OmegaConf

from shardlab.config.schema import Config, PlanConfig, RuntimeConfig, SweepConfig, TrackingConfig


def config_hash(config: Config) -> str:
    """16 hex digits that tell configs apart by what would be trained: the typed config without run_dir, tracking,
    sweep, plan and runtime.timeout."""
    same = replace(
        config,
        run_dir="",
        tracking=TrackingConfig(name=""),
        sweep=SweepConfig(),
        plan=PlanConfig(),
        runtime=replace(config.runtime, timeout=RuntimeConfig().timeout),
    )
    return hashlib.sha256(OmegaConf.to_yaml(OmegaConf.structured(same), sort_keys=True).encode()).hexdigest()[:16]
