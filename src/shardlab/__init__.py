"""shardlab trains one config under any partitioning: the same numbers, and the measured price of each way to split.

From Python: `record = shardlab.train(["model=tiny", "strategy=ddp", "ranks=2"])`. Importing the package costs
nothing; torch, Hydra and MLflow are loaded by what needs them.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardlab.errors import ShardlabError

if TYPE_CHECKING:
    from shardlab.launch.run import RunFailed
    from shardlab.tracking.record import RunRecord

__version__ = "0.1.0"
__all__ = ["RunFailed", "RunRecord", "ShardlabError", "__version__", "train"]


def train(overrides: Iterable[str]) -> "RunRecord":
    """Train once, as `shardlab train` does with the same overrides, and return the run's record.

    Raises ShardlabError if the config or the data is wrong, RunFailed if the run was started and failed. In one of
    several processes that torchrun or srun has started it is refused: each of them would train a run of its own.
    """
    import sys

    from shardlab.cluster.environment import find_job
    from shardlab.config.check import settle
    from shardlab.config.compose import composed_from, composing
    from shardlab.config.overrides import check_overrides
    from shardlab.launch.run import run

    if isinstance(overrides, str | Mapping) or not isinstance(overrides, Iterable):
        raise ShardlabError(f"train() takes a list of overrides such as ['model=tiny'], not {overrides!r}")
    if (job := find_job()) is not None and job.ranks > 1:
        raise ShardlabError(
            f"shardlab.train() can't join a job of {job.ranks} processes (WORLD_SIZE={job.ranks}); "
            "start `shardlab train ...` there, or call it in one process"
        )
    words = list(overrides)
    sweep = "shardlab.train() runs one config; for several call it for each, or use the command: shardlab train -m ..."
    if any(word == "-m" or word.upper() == "HYDRA.MODE=MULTIRUN" for word in words if isinstance(word, str)):
        raise ShardlabError(sweep)
    check_overrides(words)
    with composing(words) as cfg:
        if cfg.hydra.mode is not None and cfg.hydra.mode.name == "MULTIRUN":
            raise ShardlabError(f"experiment={cfg.hydra.runtime.choices.experiment} is a sweep; {sweep}")
        composed, notes = settle(composed_from(cfg, cfg.hydra))
    for note in notes:
        print(note, file=sys.stderr)
    return run(composed, hydra=cfg.hydra)


def __getattr__(name: str) -> Any:
    if name == "RunRecord":
        from shardlab.tracking.record import RunRecord

        return RunRecord
    if name == "RunFailed":
        from shardlab.launch.run import RunFailed

        return RunFailed
    raise AttributeError(f"module 'shardlab' has no attribute '{name}'")
