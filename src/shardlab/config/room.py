"""What a job of several processes (torchrun, Slurm) leaves to the config of a run: it has so many ranks, no more."""

from dataclasses import dataclass

from shardlab.config.schema import Config
from shardlab.errors import ShardlabError


@dataclass(frozen=True)
class Room:
    """What a job has for the ranks of a run.

    ranks: one for each process that was started; threads: cores for the rank with the fewest
    gpus: whether each rank has a GPU of its own
    """

    ranks: int
    threads: int
    gpus: bool


def with_ranks(overrides: list[str], ranks: int) -> list[str]:
    """The overrides of a command in a job, which has as many ranks as processes unless the user says otherwise."""
    given = any(word.lstrip("+").partition("=")[0] == "ranks" for word in overrides)
    return overrides if given else [*overrides, f"ranks={ranks}"]


def check_room(config: Config, ranks: int, room: Room) -> None:
    """Raise ShardlabError where a config doesn't use exactly the processes of the job. ranks: of its mesh."""
    started = f"this job has {room.ranks} processes (WORLD_SIZE={room.ranks})"
    if config.strategy.name == "single" and room.ranks > 1:
        raise ShardlabError(
            f"strategy=single trains on one rank, and {started}; strategy=ddp, pipeline or tensor would use them"
        )
    if ranks != room.ranks:
        raise ShardlabError(f"the config has ranks={ranks}, and {started}; set ranks={room.ranks}, or start {ranks}")
    if config.sweep.parallel > 1:
        raise ShardlabError(
            f"sweep.parallel={config.sweep.parallel}, and {started}, all of which each run takes; "
            "sweep.parallel=1 would do"
        )
