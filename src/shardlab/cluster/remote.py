"""What run_ranks holds of a rank that runs on another host: it looks like a process and a pipe.

Two real pipes make it waitable: one that closes when the rank has ended, one that carries what it said. The thread
that reads the follower's messages feeds them.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import wait

from shardlab.cluster.wire import Message
from shardlab.launch.cause import Death, Failure
from shardlab.launch.rank import Finished
from shardlab.training.pulse import Pulse


class RemoteRank:
    """Stands for a rank's process; the same as multiprocessing's as far as run_ranks needs it.

    pid: None: the number means nothing on this host; exitcode: None while it runs; pipe: what the rank says
    """

    def __init__(self, end: Callable[[int], None]) -> None:
        """end: ask the follower to send the rank a signal."""
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._end_it = end
        self.sentinel, self._open_while_alive = os.pipe()
        self.pipe, self._mouth = multiprocessing.Pipe()

    def terminate(self) -> None:
        """Ask it to end."""
        self._end_it(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._end_it(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or its follower is lost."""
        wait([self.sentinel], timeout)

    def close(self) -> None:
        """Give the pipes back. The rank has ended."""
        os.close(self.sentinel)
        self._mouth.close()

    def say(self, said: Finished | Failure | Death | Pulse) -> None:
        """For the wire's thread: hand on what the rank, or its launcher, has to say."""
        with contextlib.suppress(OSError):  # nobody listens any more
            self._mouth.send(said)

    def end(self, code: int) -> None:
        """For the wire's thread: it has ended. A second call changes nothing."""
        if self.exitcode is None:
            self.exitcode = code
            os.close(self._open_while_alive)


def to_message(said: object) -> Message:
    """What a rank has said, as a message of the wire's. Raises TypeError for a result that JSON can't say."""
    if isinstance(said, Finished):
        return {"kind": "finished", "result": said.result}
    if isinstance(said, Failure):
        return {"kind": "failed", **asdict(said)}
    raise TypeError(f"a rank said {type(said).__name__}")


def from_message(message: Message, *, same_clock: bool) -> Finished | Failure | Pulse:
    """What a rank on a follower's host has said.

    same_clock: that host's monotonic clock is ours; else the moment of arrival counts
    """
    if message["kind"] == "pulse":
        return Pulse(int(message["count"]))
    if message["kind"] == "finished":
        return Finished(message["result"])
    return Failure(
        when=float(message["when"]) if same_clock else time.monotonic(),
        summary=str(message["summary"]),
        text=str(message["text"]),
        user_error=None if message["user_error"] is None else str(message["user_error"]),
        echo=bool(message["echo"]),
        run_ended=None if message["run_ended"] is None else str(message["run_ended"]),
    )
