"""Silence is counted only while the launcher looks, and the rank to blame is the one that waits for nobody."""

import os
import threading
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.distributed_c10d as c10d

import shardlab
from shardlab.launch import stacks
from shardlab.launch.cause import Hang
from shardlab.launch.hang import LONGEST_LOOK, HangWatch, Silence, guilty
from shardlab.launch.stacks import Frame, Stack, ask_stacks, read_stack, state, tell_on_request
from shardlab.training import pulse

PACKAGE = Path(shardlab.__file__).parent


def test_silence_is_the_time_since_the_count_went_up() -> None:
    silence = Silence(now=0.0)
    for now, counts in ((0.5, {0: 0, 1: 0}), (1.0, {0: 0, 1: 3}), (1.5, {0: 0, 1: 3}), (2.0, {0: 7, 1: 3})):
        silence.look(now, counts)
    assert silence.seconds == {0: 0.0, 1: 1.0}
    silence.look(2.5, {1: 3})
    assert silence.seconds == {1: 1.5}


def test_time_in_which_the_launcher_did_not_look_hardly_counts() -> None:
    silence = Silence(now=0.0)
    silence.look(0.5, {0: 0})
    silence.look(9000.0, {0: 0})
    assert silence.seconds == {0: 0.5 + LONGEST_LOOK}


BUSY = Stack("", [[Frame("/home/user/model.py", 3, "f")]])
WAITING = Stack("", [[Frame(c10d.__file__, 3, "all_reduce"), Frame("/home/user/model.py", 3, "f")]])

SILENT = [
    # silence of each rank     states    stacks                       the one to blame
    ([9.0, 9.5], "SS", {0: BUSY, 1: WAITING}, 0),
    ([9.5, 9.0], "SS", {0: WAITING, 1: BUSY}, 1),
    ([9.0, 9.5], "SR", {0: BUSY, 1: BUSY}, 1),
    ([9.5, 9.0], "ST", {0: BUSY, 1: WAITING}, 1),
    ([9.0, 9.5], "SS", {0: WAITING, 1: WAITING}, 1),
    ([9.0, 0.5], "SR", {0: WAITING, 1: BUSY}, None),
    ([0.5, 9.0, 9.5], "RSS", {0: BUSY, 1: WAITING, 2: WAITING}, None),
    ([0.5, 9.0, 9.5], "RSS", {1: BUSY, 2: WAITING}, 1),
    ([9.5, 9.0], "SD", {0: WAITING}, 1),
]


@pytest.mark.parametrize(("silence", "states", "stacks", "rank"), SILENT)
def test_the_rank_to_blame(silence: list[float], states: str, stacks: dict[int, Stack], rank: int | None) -> None:
    assert guilty(dict(enumerate(silence)), 8.0, dict(enumerate(states)), stacks) == rank


def line_of(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_a_wait_for_other_ranks_is_known_by_its_innermost_frame() -> None:
    replicate = PACKAGE / "parallel" / "replicate.py"
    wait, send = line_of(replicate, "work.wait()"), line_of(replicate, "self._send()")
    assert Frame(str(replicate), wait, "finish").waits_for_ranks
    assert not Frame(str(replicate), send, "finish").waits_for_ranks
    assert Frame(c10d.__file__, 1, "recv").waits_for_ranks
    assert not Frame(
        threading.__file__, line_of(Path(threading.__file__), "signaled = self._cond.wait("), "wait"
    ).waits_for_ranks
    assert not Frame(str(PACKAGE / "training" / "evaluation.py"), 41, "evaluate").waits_for_ranks


SAID = f"""Thread 0x00007f5d2cff36c0 (most recent call first):
  File "{os.__file__[:-5]}selectors.py", line 415 in select
  File "{PACKAGE}/launch/rank.py", line 105 in watch

Current thread 0x00007f5d2e254b80 (most recent call first):
  File "{os.__file__[:-5]}random.py", line 12 in random
  File "{PACKAGE}/training/evaluation.py", line 41 in evaluate
  File "{PACKAGE}/launch/rank.py", line ??? in live
"""


def test_a_stack_is_read_and_says_where_the_main_thread_is_in_our_code_or_the_users() -> None:
    stack = read_stack(SAID)
    assert stack is not None
    assert [len(frames) for frames in stack.threads] == [2, 3]
    assert stack.place == "evaluate at training/evaluation.py:41"
    assert stack.threads[1][2] == Frame(f"{PACKAGE}/launch/rank.py", 0, "live")
    assert not stack.waits_for_ranks
    assert BUSY.place == "f at model.py:3"
    assert read_stack("Current thread 0x0 (most recent call first):\n  <no Python frame>\n") is None


def test_a_hang_is_told_in_words() -> None:
    hang = Hang(0.0, 600.0, "in evaluate at training/evaluation.py:41", "")
    assert hang.summary == "hangs: silent for 600 s (runtime.timeout), in evaluate at training/evaluation.py:41"


@pytest.fixture
def _no_pulse() -> Iterator[None]:
    yield
    pulse._count = None


@pytest.mark.usefixtures("_no_pulse")
def test_beats_of_a_rank_are_seen_and_the_launcher_then_decides(tmp_path: Path) -> None:
    pulse.beat()
    assert pulse.group_timeout(7.0) == 7.0
    pulse.make(tmp_path / "pulses", 3)
    seen = pulse.counts(tmp_path / "pulses")
    pulse.set_up(tmp_path / "pulses", 1)
    for _ in range(4):
        pulse.beat()
    assert list(seen) == [0, 5, 0]
    assert pulse.group_timeout(7.0) == pulse.LAUNCHER_DECIDES
    assert timeit.timeit(pulse.beat, number=10_000) < 1.0  # 100 µs each would be far too slow; it takes about 0.1


@pytest.fixture
def _own_answers() -> Iterator[None]:
    yield
    import faulthandler

    faulthandler.unregister(stacks.REQUEST)
    stacks._answers.clear()


@pytest.mark.usefixtures("_own_answers")
def test_the_watch_blames_this_very_process_once_it_is_silent(tmp_path: Path) -> None:
    tell_on_request(stacks.stack_file(tmp_path, 0))
    watch = HangWatch(tmp_path, tmp_path, ranks=1, timeout=2.0, now=0.0)
    beats = pulse.counts(tmp_path / pulse.FILE)
    processes = {0: os.getpid()}
    assert [watch.look(now, processes) for now in (1.0, 1.9)] == [None, None]
    beats[0] += 1
    assert [watch.look(now, processes) for now in (2.5, 3.5)] == [None, None]
    found = watch.look(4.5, processes)
    assert found is not None
    assert (found[0], found[1].seconds) == (0, 2.0)
    assert "test_ranks_hang.py" in found[1].text
    assert found[1].text in (tmp_path / "rank-0.log").read_text()


def test_a_rank_that_has_just_gone_is_not_blamed_for_a_hang(tmp_path: Path) -> None:
    gone = 2**22 + 1  # larger than any process number
    assert state(gone) == "X"
    assert ask_stacks({0: gone}, tmp_path) == {}
    watch = HangWatch(tmp_path, tmp_path, ranks=1, timeout=0.5, now=0.0)
    assert [watch.look(now, {0: gone}) for now in (0.4, 0.8, 1.2)] == [None, None, None]
