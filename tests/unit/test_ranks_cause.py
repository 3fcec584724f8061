"""The rank that is named is the one that failed first, not the one whose connection broke."""

from itertools import pairwise

import pytest

from shardlab.errors import ShardlabError
from shardlab.launch.cause import Death, Failure, describe_failure, first_cause


class DistError(RuntimeError):
    """Stands for the base of torch's errors."""


def chain(*errors: BaseException, explicit: bool = False) -> BaseException:
    """The last error, raised while the ones before it were handled (or from them)."""
    for before, after in pairwise(errors):
        if explicit:
            after.__cause__ = before
        else:
            after.__context__ = before
    return errors[-1]


CLOSED = "[gloo] Connection closed by peer [127.0.0.1]:12"

DESCRIBED = [
    # error                                                                      summary               echo
    (ValueError("two\nlines"), "ValueError: two lines", False),
    (ValueError(), "ValueError", False),
    (RuntimeError(CLOSED), f"RuntimeError: {CLOSED}", True),
    (ValueError(CLOSED), f"ValueError: {CLOSED}", False),
    (ConnectionResetError("Connection reset by peer"), "ConnectionResetError: Connection reset by peer", True),
    (DistError("anything"), "DistError: anything", True),
    (chain(KeyError("k"), RuntimeError(CLOSED)), "KeyError: 'k'", False),
    (chain(RuntimeError(CLOSED), ValueError("wrapped"), explicit=True), "ValueError: wrapped", True),
    (chain(KeyError("k"), ValueError("better said"), explicit=True), "ValueError: better said", False),
]


@pytest.mark.parametrize(("error", "summary", "echo"), DESCRIBED)
def test_an_error_is_an_echo_if_the_first_of_its_chain_is(error: BaseException, summary: str, echo: bool) -> None:
    failure = describe_failure(error, when=1.0)
    assert (failure.summary, failure.echo, failure.user_error) == (summary, echo, None)
    assert type(error).__name__ in failure.text


def test_what_the_user_can_mend_is_known_as_such() -> None:
    assert describe_failure(ShardlabError("a=1 is wrong"), when=1.0).user_error == "a=1 is wrong"


def failed(when: float, echo: bool = False) -> Failure:
    return Failure(when, "E", "", None, echo)


KILL, ABORT = -9, -6
CAUSES = [
    # failures by rank                        deaths by rank                             the rank to name
    ({0: failed(1.0, echo=True), 1: failed(2.0)}, {}, 1),
    ({0: failed(2.0), 1: failed(1.0)}, {}, 1),
    ({0: failed(1.0, echo=True)}, {1: Death(2.0, KILL)}, 1),
    ({0: failed(1.0, echo=True)}, {1: Death(2.0, 7)}, 1),
    ({0: failed(3.0)}, {1: Death(2.0, KILL)}, 1),
    ({0: failed(1.0)}, {1: Death(2.0, KILL)}, 0),
    ({1: failed(2.0)}, {0: Death(1.0, ABORT)}, 1),
    ({0: failed(1.0, echo=True)}, {1: Death(2.0, ABORT)}, 1),
    ({0: failed(2.0, echo=True), 2: failed(1.0, echo=True)}, {}, 2),
]


@pytest.mark.parametrize(("failures", "deaths", "rank"), CAUSES)
def test_the_first_cause_is_named(failures: dict[int, Failure], deaths: dict[int, Death], rank: int) -> None:
    assert first_cause(failures, deaths)[0] == rank


DEATHS = [
    (-9, "was killed by SIGKILL (out of memory?)"),
    (-11, "was killed by SIGSEGV"),
    (-63, "was killed by signal 63"),
    (0, "left with exit status 0 before it had finished"),
    (7, "left with exit status 7 before it had finished"),
]


@pytest.mark.parametrize(("code", "summary"), DEATHS)
def test_a_death_is_told_in_words(code: int, summary: str) -> None:
    assert Death(0.0, code).summary == summary


SAID = [
    ("ValueError: the step is broken", "raised ValueError: the step is broken"),
    ("MemoryError", "ran out of memory (MemoryError)"),
    ("OutOfMemoryError: CUDA out of memory.", "ran out of memory (OutOfMemoryError: CUDA out of memory.)"),
    (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
        "ran out of memory (RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.)",
    ),
]


@pytest.mark.parametrize(("summary", "claim"), SAID)
def test_running_out_of_memory_is_called_so(summary: str, claim: str) -> None:
    assert Failure(0.0, summary, "", None, echo=False).claim == claim
