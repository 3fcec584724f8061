"""How many steps a run takes, from config and data alone: what can't work is refused before there is any rank."""

from __future__ import annotations

from shardlab.config.schema import Config, CosineConfig
from shardlab.data.corpora import row_length
from shardlab.data.prepared import Meta, steps_in_pass
from shardlab.errors import ShardlabError


def run_length(config: Config, data: Meta) -> tuple[int, int]:
    """Number of steps in the whole run, and in an epoch.

    Raises ShardlabError where the data is too short for one step, or the warm-up too long for the run.
    """
    trainer = config.trainer
    epoch_steps = steps_in_pass(data, "train", global_batch=trainer.global_batch, max_len=row_length(config.dataset))
    if trainer.epoch_steps is not None:
        epoch_steps = min(epoch_steps, trainer.epoch_steps)
    limits = [trainer.steps, trainer.epochs and trainer.epochs * epoch_steps]
    total_steps = min((limit for limit in limits if limit), default=epoch_steps)
    scheduler = config.scheduler
    if isinstance(scheduler, CosineConfig) and scheduler.warmup_steps >= total_steps:
        raise ShardlabError(
            f"scheduler.warmup_steps={scheduler.warmup_steps} leaves nothing of the run's {total_steps} steps; "
            f"0 to {total_steps - 1} would"
        )
    return total_steps, epoch_steps
