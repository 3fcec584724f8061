"""Which rank failed first, and why.

When one rank dies, the others fail a moment later because their connection to it broke. Those echoes often reach
the launcher first, so arrival does not decide. An error that is no echo wins, and so does a rank killed by a
signal; among these the earliest. Only where nothing else is known does an echo count.
"""

import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.errors import RunEnded, ShardlabError

ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Read error",
    "Write error",
    "recvValue failed",
    "sendBytes failed",
    "Timed out waiting",
    "wait timeout",
    "connectFullMesh failed",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)
"""What torch.distributed says, on gloo, nccl and its stores, when another rank has gone."""

OUT_OF_MEMORY = ("MemoryError", "can't allocate memory")
"""What Python, CUDA's part of torch (OutOfMemoryError) and its part for the CPU say."""


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank, in the rank's own words.

    when: seconds of the monotonic clock, which all processes of a machine share
    summary: one line, "ValueError: what it said"
    text: the traceback
    user_error: the message, if it was a ShardlabError
    echo: it only says that another rank has gone
    run_ended: the message, if it was RunEnded: the reason of the whole run, whichever rank said it
    """

    when: float
    summary: str
    text: str
    user_error: str | None
    echo: bool
    run_ended: str | None = None

    @property
    def claim(self) -> str:
        """The claim about the rank: "raised ValueError: ...", "ran out of memory (RuntimeError: ...)"."""
        if any(sign in self.summary for sign in OUT_OF_MEMORY):
            return f"ran out of memory ({self.summary})"
        return f"raised {self.summary}"


@dataclass(frozen=True)
class Death:
    """A rank that ended without a word. when: as the launcher noticed it; code: exit status, or minus the signal."""

    when: float
    code: int

    @property
    def summary(self) -> str:
        """The claim about the rank: "was killed by SIGKILL (out of memory?)"."""
        if self.code >= 0:
            return f"left with exit status {self.code} before it had finished"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}" + (" (out of memory?)" if self.code == -signal.SIGKILL else "")

    @property
    def echo(self) -> bool:
        """A thread of gloo that loses its peer may abort the process, so an abort counts after everything else."""
        return self.code == -signal.SIGABRT


@dataclass(frozen=True)
class Lost(Death):
    """A rank of another launcher that is heard of no more.

    when: as it was last heard of; code: none that means anything; host: where it ran; why: what happened
    """

    host: str
    why: str

    @property
    def summary(self) -> str:
        """See Death."""
        return f"on {self.host} is lost: {self.why}"

    @property
    def echo(self) -> bool:
        """Never: whatever the other ranks say of broken connections came of it."""
        return False


@dataclass(frozen=True)
class Hang:
    """A rank that was silent for too long, and that the launcher therefore ended.

    seconds: runtime.timeout; where: in words; text: the stacks of its threads, "" if it didn't say
    """

    when: float
    seconds: float
    where: str
    text: str
    echo: bool = False

    @property
    def summary(self) -> str:
        """The claim about the rank: "hangs: silent for 600 s (runtime.timeout), in evaluate at ..."."""
        return f"hangs: silent for {self.seconds:g} s (runtime.timeout), {self.where}"


def describe_failure(error: BaseException, when: float) -> Failure:
    """What a rank reports of the exception that ended it.

    Of a chain of exceptions, the first that happened decides whether it is an echo: an error of the step whose
    clean-up then met a closed connection is no echo, and a broken connection wrapped in another error is one.
    """
    chain = _chain(error)
    shown = next((link for link in chain if not _is_echo(link)), error)
    try:
        message = " ".join(str(shown).split())
    except Exception:
        message = ""
    return Failure(
        when=when,
        summary=f"{type(shown).__name__}: {message}"[:500] if message else type(shown).__name__,
        text="".join(traceback.format_exception(error)),
        user_error=message if isinstance(shown, ShardlabError) else None,
        echo=_is_echo(chain[-1]),
        run_ended=message if isinstance(shown, RunEnded) else None,
    )


def first_cause(
    failures: Mapping[int, Failure], deaths: Mapping[int, Death | Hang]
) -> tuple[int, Failure | Death | Hang]:
    """The rank to name and how it ended. At least one of the two must hold something."""
    known: dict[int, Failure | Death | Hang] = {**deaths, **failures}

    def order(rank: int) -> tuple[bool, bool, float]:
        end = known[rank]
        return end.echo, end.echo and isinstance(end, Failure), end.when

    rank = min(known, key=order)
    return rank, known[rank]


def _chain(error: BaseException) -> list[BaseException]:
    """The exception, then what it came from, back to the first."""
    chain = [error]
    while True:
        last = chain[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in chain:
            return chain
        chain.append(before)


def _is_echo(error: BaseException) -> bool:
    # By name: this module must not import torch.
    from_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return from_torch or (isinstance(error, (RuntimeError, OSError)) and any(echo in str(error) for echo in ECHOES))
