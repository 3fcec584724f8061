"""Signals are noted and never strike in the middle of something; afterwards everything is as before."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable

import pytest

from shardlab.launch.signals import HANDLED, Signals, Stop, Stopped


@pytest.fixture(autouse=True)
def _as_in_a_command():
    before = {number: signal.getsignal(number) for number in HANDLED}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


CASES = [
    ([signal.SIGINT], KeyboardInterrupt, None),
    ([signal.SIGTERM], SystemExit, 143),
    ([signal.SIGTERM, signal.SIGINT], SystemExit, 143),
    ([signal.SIGINT, signal.SIGINT, signal.SIGTERM], KeyboardInterrupt, None),
]


@pytest.mark.parametrize(("sent", "kind", "code"), CASES)
def test_the_first_signal_is_noted_and_wakes_whoever_waits(
    sent: list[signal.Signals], kind: type[BaseException], code: int | None
) -> None:
    with Signals() as signals:
        signals.check()
        for number in sent:
            os.kill(os.getpid(), number)
        assert signals.received == sent[0]
        assert signals.count == len(sent)
        assert select.select(signals.wakes, [], [], 0)[0]
        with pytest.raises(kind) as interruption:
            signals.check()
        assert getattr(interruption.value, "code", None) == code
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_where_nothing_can_be_half_done_a_signal_raises_at_once() -> None:
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.raising():
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # outside again: noted
        with pytest.raises(KeyboardInterrupt), signals.raising():
            pytest.fail("one that came before raises too")


def test_an_ignored_signal_stays_ignored() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_outside_the_main_thread_no_handler_is_touched() -> None:
    found = []

    def enter() -> None:
        with Signals() as signals:
            found.append((signals.wakes, signal.getsignal(signal.SIGINT)))

    in_thread(enter)
    assert found == [([], signal.default_int_handler)]


def in_thread(work: Callable[[], None]) -> None:
    """Do it in another thread, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def interruption(signals: Signals) -> str:
    """What `check` raises, or nothing."""
    try:
        signals.check()
    except BaseException as error:
        return repr(error)
    return "nothing"


def readable(signals: Signals) -> bool:
    return bool(select.select(signals.wakes, [], [], 0)[0])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_thread_hears_what_the_outermost_of_the_main_thread_or_one_within_it_notes(depth: int) -> None:
    found: list[object] = []
    entered, sent = threading.Event(), threading.Event()

    def work() -> None:
        with Signals() as signals, Signals() as nested:
            found.extend([interruption(nested), readable(signals)])
            entered.set()
            sent.wait(10)
            for each in (signals, nested):
                found.append((interruption(each), each.received, each.count, readable(each)))

    thread = threading.Thread(target=work)
    with Signals() as outermost:
        with Signals() if depth == 2 else contextlib.nullcontext():
            thread.start()
            entered.wait(10)
            os.kill(os.getpid(), signal.SIGTERM)
            sent.set()
            thread.join()
        assert interruption(outermost) == "SystemExit(143)"
    assert found == ["nothing", False, *[("SystemExit(143)", signal.SIGTERM, 1, True)] * 2]


def test_a_thread_that_comes_after_the_signal_hears_of_it() -> None:
    found: list[str] = []

    def work() -> None:
        with Signals() as signals:
            found.append(interruption(signals))
            try:
                with signals.raising():
                    found.append("not to be reached")
            except KeyboardInterrupt:
                found.append("raised before")

    with Signals():
        os.kill(os.getpid(), signal.SIGINT)
        in_thread(work)
    assert found == ["KeyboardInterrupt()", "raised before"]


def test_in_a_thread_a_signal_raises_only_after_the_work() -> None:
    found: list[str] = []

    def work() -> None:
        with Signals() as signals:
            try:
                with signals.raising():
                    os.kill(os.getpid(), signal.SIGINT)
                    while signals.received is None:
                        pass
                    found.append("the work is done")
            except KeyboardInterrupt:
                found.append("raised after")

    with Signals():
        in_thread(work)
    assert found == ["the work is done", "raised after"]


def test_a_pipe_outlives_the_outermost_as_long_as_a_thread_looks_at_it() -> None:
    found: list[object] = []
    entered, left = threading.Event(), threading.Event()

    def work() -> None:
        with Signals() as signals:
            files = list(signals.wakes)
            entered.set()
            left.wait(10)
            found.extend([signals.wakes == files, interruption(signals), readable(signals), *files])

    thread = threading.Thread(target=work)
    with Signals():
        thread.start()
        entered.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
    left.set()
    thread.join()
    *said, file = found
    assert said == [True, "KeyboardInterrupt()", True]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(int(str(file)))
    with Signals() as signals:
        assert interruption(signals) == "nothing"


def test_a_place_that_raises_does_not_reach_into_one_within_it() -> None:
    reached = []
    with Signals() as outer, contextlib.suppress(KeyboardInterrupt), outer.raising():
        with Signals() as inner:
            os.kill(os.getpid(), signal.SIGINT)
            reached += [inner.received, outer.received]
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("behind a place that raises")
    assert reached == [signal.SIGINT, signal.SIGINT]


def test_a_stop_wakes_and_ends_its_own_work_alone() -> None:
    stop = Stop()
    with Signals(stop) as signals, Signals(Stop()) as other:
        assert (interruption(signals), readable(signals)) == ("nothing", False)
        in_thread(lambda: stop.pull("another job failed"))
        stop.pull("a second time")
        with pytest.raises(Stopped) as stopped:
            signals.check()
        assert stopped.value.reason == "another job failed"
        assert (readable(signals), readable(other), interruption(other)) == (True, False, "nothing")
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption(signals) == "KeyboardInterrupt()"
