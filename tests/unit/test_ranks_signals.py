"""Signals are noted and never strike in the middle of something; afterwards everything is as before."""

import os
import select
import signal
import threading

import pytest

from shardlab.launch.signals import HANDLED, Signals


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

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [([], signal.default_int_handler)]
