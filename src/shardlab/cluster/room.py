"""What a job of several processes (torchrun, Slurm) leaves to a run: it has so many ranks, no more and no fewer."""

from shardlab.config.schema import Config
from shardlab.errors import ShardlabError


def with_ranks(overrides: list[str], processes: int) -> list[str]:
    """The overrides of a command in a job: as many ranks as processes, unless the user gives another number."""
    given = any(word.lstrip("+").partition("=")[0] == "ranks" for word in overrides)
    return overrides if given else [*overrides, f"ranks={processes}"]


def check_processes(config: Config, processes: int) -> None:
    """Raise ShardlabError where a checked config doesn't use exactly the processes of the job."""
    started = _started(processes)
    if config.ranks == processes:
        return
    if config.strategy.name == "single":
        raise ShardlabError(
            f"strategy=single trains on one rank, and {started}; strategy=ddp, pipeline or tensor would use them"
        )
    raise ShardlabError(
        f"the config has ranks={config.ranks}, and {started}; set ranks={processes}, or start {config.ranks}"
    )


def check_parallel(parallel: int, processes: int) -> None:
    """Raise ShardlabError for a sweep that would run several jobs at the same time."""
    if parallel > 1:
        raise ShardlabError(
            f"sweep.parallel={parallel}: {_started(processes)}, and each run takes them all; sweep.parallel=1 would do"
        )


def _started(processes: int) -> str:
    return f"this job has {processes} processes (WORLD_SIZE={processes})"
