"""Messages between lead and followers: whole ones arrive, everything else is refused, and silence is noticed."""

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardlab.cluster import follow, wire
from shardlab.cluster.environment import Job
from shardlab.cluster.follow import facts
from shardlab.cluster.lead import Lead
from shardlab.cluster.network import interface_of, listen
from shardlab.cluster.wire import Link, WireError
from shardlab.config.compose import compose, config_yaml
from shardlab.errors import ShardlabError
from shardlab.launch.signals import Signals

Pair = tuple[Link, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A link, and the raw other end."""
    with listen(0, here_only=True) as listener, socket.create_connection(listener.getsockname()[:2]) as raw:
        accepted, _ = listener.accept()
        with accepted:
            yield Link(accepted), raw


def packed(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def test_messages_arrive_whole_and_in_order_however_they_are_cut(pair: Pair) -> None:
    link, raw = pair
    sent = packed({"kind": "a", "text": "ü" * 100}) + packed({"kind": "b"})
    for byte in sent[:-1]:
        raw.sendall(bytes([byte]))
    assert link.receive(5) == {"kind": "a", "text": "ü" * 100}
    assert link.receive(0.05) is None  # a part of one
    raw.sendall(sent[-1:])
    assert link.receive(5) == {"kind": "b"}


REFUSED = [
    (b"\xff\xff\xff\xff", "4294967295 bytes"),
    (b"GET / HTTP/1.1\r\n", "bytes; at most"),
    (struct.pack("!I", 3) + b"{}}", "no JSON"),
    (struct.pack("!I", 2) + b"\xff\xfe", "no JSON"),
    (packed([1]), "without a kind"),
    (packed({"kind": 1}), "without a kind"),
]


@pytest.mark.parametrize(("sent", "why"), REFUSED)
def test_what_is_no_message_is_refused(pair: Pair, sent: bytes, why: str) -> None:
    link, raw = pair
    raw.sendall(sent)
    with pytest.raises(WireError, match=why):
        link.receive(5)


def test_a_torn_message_is_told_from_a_goodbye(pair: Pair) -> None:
    link, raw = pair
    raw.sendall(packed({"kind": "a"})[:-1])
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match="ended 16 bytes into a message"):
        link.receive(5)


def test_a_goodbye_is_the_end(pair: Pair) -> None:
    link, raw = pair
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        link.receive(5)


def attend(link: Link, patience: float) -> tuple[list[wire.Message], list[str], threading.Event]:
    heard: list[wire.Message] = []
    lost: list[str] = []
    over = threading.Event()

    def lose(why: str, since: float) -> None:
        lost.append(why)
        over.set()

    link.attend(heard.append, lose, lambda: patience)
    return heard, lost, over


def test_silence_is_a_loss_and_beats_are_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BEAT_SECONDS", 0.05)
    link, raw = pair
    heard, lost, over = attend(link, 3.0)
    for _ in range(16):
        raw.sendall(packed({"kind": "beat"}))
        time.sleep(0.25)
    assert lost == []
    raw.sendall(packed({"kind": "news"}))
    assert over.wait(10)
    assert heard == [{"kind": "news"}]
    assert lost == ["nothing was heard from it for 3 s"]
    assert packed({"kind": "beat"}) in raw.recv(2**16)


@pytest.mark.parametrize(("sent", "why"), [(b"", "its launcher has gone"), (b"\0\0", "the connection to it broke")])
def test_an_end_is_a_loss(pair: Pair, sent: bytes, why: str) -> None:
    link, raw = pair
    _, lost, over = attend(link, 60)
    raw.sendall(sent)
    raw.shutdown(socket.SHUT_WR)
    assert over.wait(10)
    assert lost[0].startswith(why)


JOB = Job(0, 2, 0, 2, "127.0.0.1", 1, False, "key")


@pytest.fixture
def lead() -> Iterator[tuple[Lead, Callable[[], Link]]]:
    """The lead of a job of two, and a way to connect with it."""
    listener = listen(0, here_only=True)
    address = listener.getsockname()[:2]
    made = Lead(JOB, listener, "secret")
    links: list[Link] = []

    def connect() -> Link:
        links.append(Link(socket.create_connection(address)))
        return links[-1]

    yield made, connect
    made.over(0, 0)
    for link in links:
        link.close()


def within(seconds: float) -> Callable[[], None]:
    """A check that fails after that time."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        assert time.monotonic() < deadline

    return check


def hello(**changed: object) -> dict[str, object]:
    return {"token": "secret", "rank": 1, "local_rank": 1, **facts(), **changed}


STRANGERS = [
    # hello                                          reason
    (hello(token="guess"), "this is another job's lead"),
    (hello(token=None), "this is another job's lead"),
    ({}, "this is another job's lead"),
    (hello(rank=2), "there is no rank 2"),
    (hello(rank=0), "there is no rank 0"),
    (hello(versions={"shardlab": "0", "torch": "0"}), "install the same on all hosts"),
]


@pytest.mark.parametrize(("said", "reason"), STRANGERS)
def test_a_stranger_is_refused(lead: tuple[Lead, Callable[[], Link]], said: dict[str, object], reason: str) -> None:
    link = lead[1]()
    link.send("hello", **said)
    answer = link.receive(10)
    assert answer is not None
    assert answer["kind"] == "refused"
    assert reason in answer["reason"]
    with pytest.raises(EOFError):
        link.receive(10)


def test_a_stranger_who_says_too_much_is_cut_off(lead: tuple[Lead, Callable[[], Link]]) -> None:
    link = lead[1]()
    link.send("hello", **hello(), more="x" * wire.LARGEST_HELLO)
    with pytest.raises((EOFError, OSError)):
        link.receive(10)


def test_a_follower_is_welcome_once_and_then_the_cores_are_shared(lead: tuple[Lead, Callable[[], Link]]) -> None:
    made, connect = lead
    first, second = connect(), connect()
    first.send("hello", **hello(cores=[0, 1]))
    assert (first.receive(10) or {})["kind"] == "welcome"
    second.send("hello", **hello())
    assert "there is a rank 1 already" in (second.receive(10) or {})["reason"]
    made._facts["cores"] = [0, 1, 2, 3]
    assert made.share().cores == 2  # the follower's two, shared with rank 0: one each
    made._followers[1].facts["cores"] = [4, 5]
    assert made.share().cores == 4  # bound apart: the fewest have two


def test_a_lost_follower_ends_the_wait_for_its_answer(lead: tuple[Lead, Callable[[], Link]]) -> None:
    made, connect = lead
    link = connect()
    link.send("hello", **hello(host="b"))
    link.receive(10)
    made.share()
    link.close()
    with pytest.raises(ShardlabError, match="rank 1 on b is lost: its launcher has gone"):
        made._ask("prepare", within(30))


def test_gpus_are_dealt_out_among_those_that_see_the_same(lead: tuple[Lead, Callable[[], Link]]) -> None:
    made, connect = lead
    link = connect()
    link.send("hello", **hello(gpus=2, shown=None))
    link.receive(10)
    made.share()  # it has joined
    made._facts.update(gpus=2, shown=None)
    assert (made._gpu(0), made._gpu(1), made.share().gpus) == (0, 1, 2)
    made._facts.update(gpus=1, shown="0")  # Slurm has given each process one
    made._followers[1].facts.update(gpus=1, shown="1")
    assert (made._gpu(0), made._gpu(1), made.share().gpus) == (0, 0, 2)
    made._facts.update(gpus=1, shown=None)
    made._followers[1].facts.update(gpus=1, shown=None)
    assert made.share().gpus == 1


def test_the_loopback_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


FOLDERS = [
    # what this host sees as provenance.json        what it says
    ("the lead's", None),
    ("another's", "is not the lead's folder on .* is another run's.*; give a run_dir on a file system that all hosts"),
    (None, "is not the lead's folder on .* can't be read: No such file or directory"),
]


@pytest.mark.parametrize(("seen", "why"), FOLDERS)
def test_a_run_folder_that_is_not_shared_is_refused(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str | None, why: str | None
) -> None:
    monkeypatch.setattr(follow, "SHARED_SECONDS", 0.1)
    link, raw = pair
    if seen is not None:
        (tmp_path / "provenance.json").write_text(seen)
    follower = follow._Follower(JOB, link, "node0", Signals())
    follower._begin({"folder": str(tmp_path), "provenance": "the lead's"})
    answer = Link(raw).receive(10)
    assert answer is not None
    assert answer["mendable"]
    if why is None:
        assert answer["reason"] is None
    else:
        assert re.search(why, answer["reason"])


def test_a_config_that_has_travelled_is_the_same_and_data_that_differ_are_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, raw = pair
    composed = compose(["optimizer.kwargs.eps=1e-7", "strategy=pipeline", "strategy.split=[1,3]", "seed=7"])
    follower = follow._Follower(JOB, link, "node0", Signals())
    follower._prepare({"config": config_yaml(composed.config), "fingerprint": "0123"})
    assert follower.config == composed.config
    answer = Link(raw).receive(10)
    assert answer is not None
    assert "dataset pydoc has other contents on " in answer["reason"]
