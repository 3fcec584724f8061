"""How the followers find the lead.

torchrun keeps a TCPStore at MASTER_PORT: the lead listens somewhere else and leaves its port and a secret there. That
needs torch, so it is done in a process of the fork server's, which has torch loaded and without which no rank could
start anyway. Where there is no torchrun nobody uses MASTER_PORT, and the lead listens at it itself.
"""

import json
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardlab.cluster.environment import Job
from shardlab.cluster.network import is_loopback, listen
from shardlab.errors import ShardlabError
from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.training.place import Place

JOIN_SECONDS = 300.0
"""How long lead and followers wait for each other: a thousand processes that import from one file server are slow."""

RETRY_SECONDS = 0.2


def open_meeting(job: Job) -> tuple[socket.socket, str]:
    """For the lead: a listening socket that the followers will find, and the token that they will show.

    Raises ShardlabError if there can be none.
    """
    here_only = is_loopback(job.address) or job.local_ranks == job.ranks
    if not job.has_store:
        try:
            return listen(job.port, here_only=here_only), job.token
        except OSError as error:
            raise ShardlabError(
                f"can't listen at MASTER_PORT={job.port}: {error.strerror or error}; set it to a port that is free"
            ) from error
    listener, token = listen(0, here_only=here_only), secrets.token_hex(32)
    address = "127.0.0.1" if here_only else job.address
    text = json.dumps({"address": address, "port": listener.getsockname()[1], "token": token})
    try:
        _in_rank(_publish, job, text)
    except BaseException:
        listener.close()
        raise
    return listener, token


def find_lead(job: Job) -> tuple[str, int, str]:
    """For a follower: the lead's address and port, and the token. Raises ShardlabError if the store can't be had."""
    if not job.has_store:
        return job.address, job.port, job.token
    said = json.loads(str(_in_rank(_look_up, job, "")))
    return str(said["address"]), int(said["port"]), str(said["token"])


def reach(address: str, port: int, check: Callable[[], None]) -> socket.socket:
    """A connection to the lead, which may not listen yet. check: called between the tries. Raises ShardlabError."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        check()
        try:
            return socket.create_connection((address, port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ShardlabError(
                    f"no lead at {address}:{port} within {JOIN_SECONDS:.0f} s ({error.strerror or error}): is "
                    "MASTER_ADDR the host of rank 0, and may its ports be reached from here?"
                ) from error
        time.sleep(RETRY_SECONDS)


def _in_rank(function: Callable[..., object], job: Job, text: str) -> object:
    with tempfile.TemporaryDirectory(prefix="shardlab-", ignore_cleanup_errors=True) as folder:
        try:
            return run_ranks(function, (job, text), 1, log_dir=Path(folder))[0]
        except RanksFailed as failed:
            raise ShardlabError(
                f"can't use torchrun's store at MASTER_ADDR={job.address} MASTER_PORT={job.port}: {failed.reason}"
            ) from failed


def _publish(place: Place, job: Job, text: str) -> None:
    _store(job).set(f"shardlab/{job.key}", text)


def _look_up(place: Place, job: Job, text: str) -> str:
    return str(_store(job).get(f"shardlab/{job.key}").decode())


def _store(job: Job) -> Any:
    import torch.distributed as dist

    client: Any = dist  # its stub leaves the class out
    return client.TCPStore(job.address, job.port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
