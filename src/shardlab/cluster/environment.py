"""What torchrun, or Slurm's srun, tells each process that it starts.

Read once, from the environment. The variables describe this process, which is a launcher; the rank that it starts
must not see them, or torch would have it meet the others where torchrun's own workers meet.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.errors import ShardlabError

OF_A_PROCESS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
"""Beside those that begin with TORCHELASTIC_: what `without_job` takes away."""

JOB_VARIABLES = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Job:
    """This process's place in a job of several.

    rank: 0..ranks-1; local_rank: its number on its host, None where nobody said
    local_ranks: how many of the job's processes are on this host, None where nobody said
    address, port: MASTER_ADDR and MASTER_PORT, on the host of rank 0
    has_store: torchrun keeps a TCPStore at that port; else nobody uses it
    key: tells this job, and this attempt at it, from every other
    """

    rank: int
    ranks: int
    local_rank: int | None
    local_ranks: int | None
    address: str
    port: int
    has_store: bool
    key: str

    @property
    def token(self) -> str:
        """What the processes of a job know it by where there is no store to keep a secret in."""
        return hashlib.sha256(f"shardlab {self.key}".encode()).hexdigest()


def find_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process belongs to; None for a command that stands alone.

    A step of Slurm's with a single task stands alone: that is what an interactive shell is.
    Raises ShardlabError where something is missing or can't be.
    """
    given = [name for name in JOB_VARIABLES if environment.get(name)]
    if given:
        if len(given) < len(JOB_VARIABLES):
            [missing] = set(JOB_VARIABLES) - set(given)
            raise ShardlabError(
                f"{given[0]} is set, so this is one process of several, but {missing} is not; "
                f"set it too, or unset {given[0]} to run alone"
            )
        rank, ranks, local_rank = "RANK", "WORLD_SIZE", "LOCAL_RANK"
        key = environment.get("TORCHELASTIC_RUN_ID", "")
        key = f"{key}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    elif environment.get("SLURM_STEP_ID") and environment.get("SLURM_NTASKS", "1") != "1":
        rank, ranks, local_rank = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        key = "slurm/" + "/".join(environment.get(name, "") for name in names)
    else:
        return None
    missing_too = [name for name in (rank, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing_too:
        raise ShardlabError(
            f"{ranks}={environment[ranks]} is set, so this is one process of several, but "
            f"{' and '.join(missing_too)} {'is' if len(missing_too) == 1 else 'are'} not: the processes find each "
            "other by MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
        )
    count = _number(environment, ranks, 1, None)
    return Job(
        rank=_number(environment, rank, 0, count - 1),
        ranks=count,
        local_rank=_number(environment, local_rank, 0, None) if environment.get(local_rank) else None,
        local_ranks=_number(environment, "LOCAL_WORLD_SIZE", 1, count) if environment.get("LOCAL_WORLD_SIZE") else None,
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", 1, 65535),
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        key=f"{key}/{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}/{count}",
    )


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what describes this process: for the rank that it starts."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_A_PROCESS and not name.startswith("TORCHELASTIC_")
    }


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environment[name]
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < least or (most is not None and value > most):
        allowed = f"{least} to {most}" if most is not None else f"a number from {least} on"
        raise ShardlabError(f"{name}={text} in the environment: it must be {allowed}")
    return value
