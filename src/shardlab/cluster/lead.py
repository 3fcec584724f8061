"""The lead: rank 0's launcher, which runs the command as if it stood alone and has the followers start the ranks.

The followers may come while the config is being composed; the lead waits for them when it must know what they have,
and at the end, to tell each how the command has ended. Then torchrun and Slurm see one status everywhere.
"""

import contextlib
import hmac
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardlab.cluster.environment import Job, without_job
from shardlab.cluster.follow import PATIENCE, facts, patience_of
from shardlab.cluster.meeting import JOIN_SECONDS, open_meeting
from shardlab.cluster.network import free_port, interface_of, is_loopback
from shardlab.cluster.remote import RemoteRank, from_message
from shardlab.cluster.wire import LARGEST_HELLO, Link, Message, WireError
from shardlab.config.check import Share
from shardlab.config.compose import config_yaml
from shardlab.config.schema import Config
from shardlab.errors import ShardlabError
from shardlab.launch import fork_server
from shardlab.launch.cause import Lost
from shardlab.launch.fork_server import Pipe, Process
from shardlab.launch.rank import Orders
from shardlab.launch.signals import HANDLED, Signals
from shardlab.launch.stacks import ANSWER_SECONDS
from shardlab.tracking.record import PROVENANCE
from shardlab.training.place import Place

CHECK_SECONDS = 0.2
HELLO_SECONDS = 10.0
FAREWELL_SECONDS = 30.0
"""How long a lead that leaves early, such as for a wrong key, waits for followers that have not come yet."""
INTERRUPTED_SECONDS = 2.0
"""The same after an interrupt, which the others have got as well."""

_until_exit: list[Link] = []
"""Connections that close with this process: that is what the followers wait for before they leave."""


@dataclass
class _Follower:
    """A follower that has joined.

    facts: see follow.facts; lost, since: what happened to it, and when; answer: to the last question
    remote: its rank, while it runs
    """

    rank: int
    facts: dict[str, Any]
    link: Link
    lost: str | None = None
    since: float = 0.0
    answer: Message | None = None
    remote: RemoteRank | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.facts['host']}"


class Lead:
    """The command's own process, and the followers that have joined it. status: the command's, once it is known."""

    def __init__(self, job: Job, listener: socket.socket, token: str) -> None:
        self.job = job
        self.status = 0
        self._listener, self._token = listener, token
        self._patience = PATIENCE
        self._rendezvous = ""
        self._is_over = False
        self._facts = facts()
        self._followers: dict[int, _Follower] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="join", daemon=True).start()

    def share(self) -> Share:
        """What the whole job has for the ranks of a run, once all followers have joined.

        As many cores for each rank as the one with the fewest has, and as many GPUs as ranks have one of their own.
        Raises ShardlabError if a follower hasn't come, or is lost.
        """
        self._wait_for_all(_nothing)
        places = self._places()
        cores = min(len(each["cores"]) // self._sharing(each) for each in places)
        gpus = sum(self._gpu(rank) < int(places[rank]["gpus"]) for rank in range(self.job.ranks))
        return Share(max(1, cores) * self.job.ranks, gpus)

    def prepare(self, config: Config, fingerprint: str, check: Callable[[], None]) -> None:
        """Have the run's data on every host, the same as here.

        check: called several times a second meanwhile, may raise. Raises ShardlabError.
        """
        self._patience = patience_of(config)
        self._ask("prepare", check, config=config_yaml(config), fingerprint=fingerprint)

    def begin(self, folder: Path, check: Callable[[], None]) -> None:
        """See that every host sees the run's folder. check: as above. Raises ShardlabError."""
        provenance = (folder / PROVENANCE).read_text(encoding="utf-8")
        self._ask("begin", check, folder=str(folder.absolute()), provenance=provenance)

    def start(self, place: Place, orders: Orders) -> tuple[Process, Pipe]:
        """Start one rank of a run that has been prepared and begun: what run_ranks takes as `start`."""
        one_host = self._one_host()
        if place.rank == 0:
            address = "127.0.0.1" if one_host else self.job.address
            self._rendezvous = f"tcp://{f'[{address}]' if ':' in address else address}:{free_port()}"
            interface = "lo" if one_host else self._here()
            here = replace(place, rendezvous=self._rendezvous, local_rank=self._gpu(0), interface=interface)
            return fork_server.start(here, replace(orders, environment=without_job(orders.environment)))
        follower = self._followers[place.rank]
        remote = RemoteRank(lambda number: self._send(follower, "end", signal=number))
        with self._changed:
            follower.remote = remote
            if follower.lost is not None:
                _lose(follower)
        added = {name: value for name, value in orders.environment.items() if os.environ.get(name) != value}
        self._send(
            follower,
            "start",
            rendezvous=self._rendezvous,
            local_rank=self._gpu(place.rank),
            one_host=one_host,
            environment=added,
            watched=orders.watched is not None,
            asks=orders.asks,
        )
        return remote, remote.pipe

    def ask_stacks(self, ranks: set[int]) -> dict[int, tuple[str, str]]:
        """How ranks of other launchers are: the kernel's letter and the stacks of each that answers in time."""
        asked = [self._followers[rank] for rank in ranks]
        for follower in asked:
            follower.answer = None
            self._send(follower, "ask")
        with self._changed:
            self._changed.wait_for(lambda: all(each.answer for each in asked), 2 * ANSWER_SECONDS)
        answers = {each.rank: each.answer for each in asked if each.answer is not None}
        return {rank: (str(answer["state"]), str(answer["text"])) for rank, answer in answers.items()}

    def over(self, status: int, seconds: float) -> None:
        """Tell every follower that the command has ended, and how. seconds: how long to wait for those yet to come."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: len(self._followers) == self.job.ranks - 1, seconds)
            followers = list(self._followers.values())
        for follower in followers:
            self._send(follower, "over", status=status)
            _until_exit.append(follower.link)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the command is over
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._welcome, args=(connection,), name="welcome", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        """Let a follower in, or tell a stranger why not."""
        link = Link(connection)
        try:
            hello = link.receive(HELLO_SECONDS, LARGEST_HELLO) or {}
            with self._changed:
                reason = self._objection(hello)
                if reason is not None:
                    link.send("refused", reason=reason)
                    link.close()
                    return
                link.send("welcome")
                follower = _Follower(int(hello["rank"]), hello, link)
                self._followers[follower.rank] = follower
                self._changed.notify_all()
        except (OSError, EOFError, WireError, KeyError, TypeError, ValueError):
            link.close()
            return
        link.attend(
            lambda message: self._hear(follower, message),
            lambda why, since: self._miss(follower, why, since),
            lambda: self._patience,
        )

    def _objection(self, hello: Message) -> str | None:
        """Why whoever says this can't join; None if it can."""
        if not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            return "this is another job's lead"
        if hello["rank"] in self._followers:
            return f"there is a rank {hello['rank']} already"
        if hello["rank"] not in range(1, self.job.ranks):
            return f"there is no rank {hello['rank']}"
        if hello["versions"] != self._facts["versions"]:
            ours = self._facts["versions"]
            return f"its versions are {hello['versions']}, the lead's {ours}; install the same on all hosts"
        return None

    def _hear(self, follower: _Follower, message: Message) -> None:
        """Take in a message; in the thread of that follower's connection."""
        with self._changed:
            remote = follower.remote
            match message["kind"]:
                case "answer":
                    follower.answer = message
                case "finished" | "failed" | "pulse" if remote is not None:
                    same_clock = follower.facts["machine"] == self._facts["machine"]
                    remote.say(from_message(message, same_clock=same_clock))
                case "exit" if remote is not None:
                    remote.end(int(message["code"]))
                    follower.remote = None
                case "signal" if message["number"] in HANDLED and not self._is_over:
                    os.kill(os.getpid(), int(message["number"]))  # what is done to one process is done to the job
            self._changed.notify_all()

    def _miss(self, follower: _Follower, why: str, since: float) -> None:
        with self._changed:
            follower.lost, follower.since = why, since
            _lose(follower)
            self._changed.notify_all()

    def _send(self, follower: _Follower, kind: str, **values: Any) -> None:
        with contextlib.suppress(OSError):  # the thread that reads will say that it is lost
            follower.link.send(kind, **values)

    def _ask(self, kind: str, check: Callable[[], None], **values: Any) -> None:
        """Ask all followers and wait for what they say, for as long as they are there."""
        self._wait_for_all(check)
        followers = list(self._followers.values())
        for follower in followers:
            follower.answer = None
            self._send(follower, kind, **values)

        def settled() -> bool:
            answers = [each.answer for each in followers]
            return all(answers) or any(answer and answer["reason"] for answer in answers) or self._lost() is not None

        self._wait(settled, check, float("inf"))
        self._refuse_lost()
        for follower in followers:
            if follower.answer is not None and follower.answer["reason"] is not None:
                if follower.answer["mendable"]:
                    raise ShardlabError(str(follower.answer["reason"]))
                raise RuntimeError(str(follower.answer["reason"]))

    def _wait(self, claim: Callable[[], bool], check: Callable[[], None], seconds: float) -> None:
        """Until the claim is true, or for so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._changed:
                if self._changed.wait_for(claim, CHECK_SECONDS):
                    return
            check()

    def _wait_for_all(self, check: Callable[[], None]) -> None:
        self._wait(lambda: len(self._followers) == self.job.ranks - 1, check, JOIN_SECONDS)
        missing = [rank for rank in range(1, self.job.ranks) if rank not in self._followers]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ShardlabError(
                f"of {self.job.ranks} processes these have not joined in {JOIN_SECONDS:.0f} s: rank {shown}; start the "
                "same command on every host, and let the hosts reach each other's ports"
            )
        self._refuse_lost()

    def _lost(self) -> _Follower | None:
        return next((each for each in self._followers.values() if each.lost is not None), None)

    def _refuse_lost(self) -> None:
        if (lost := self._lost()) is not None:
            raise ShardlabError(f"{lost.name} is lost: {lost.lost}; start the job again")

    def _places(self) -> list[dict[str, Any]]:
        """The facts of every rank's launcher, by rank."""
        return [self._facts, *(self._followers[rank].facts for rank in range(1, self.job.ranks))]

    def _sharing(self, facts: dict[str, Any]) -> int:
        """How many launchers of the same host may use the same cores; Slurm may have given each its own."""
        same = [each for each in self._places() if each["machine"] == facts["machine"]]
        return sum(not set(facts["cores"]).isdisjoint(each["cores"]) for each in same)

    def _gpu(self, rank: int) -> int:
        """Which of the GPUs that it is shown a rank takes: they are dealt out among those that are shown the same."""
        places = self._places()
        key = (places[rank]["machine"], places[rank]["shown"])
        local_rank = self.job.local_rank if rank == 0 else places[rank]["local_rank"]
        same_host = sum(each["machine"] == key[0] for each in places)
        alike = Counter((each["machine"], each["shown"]) for each in places)[key]
        if local_rank is not None and alike == same_host:
            return int(local_rank)
        return sum((each["machine"], each["shown"]) == key for each in places[:rank])

    def _one_host(self) -> bool:
        return len({each["machine"] for each in self._places()}) == 1

    def _here(self) -> str | None:
        """The interface by which followers of other hosts reach this one."""
        others = [each for each in self._followers.values() if each.facts["machine"] != self._facts["machine"]]
        reached = [address for each in others if not is_loopback(address := each.link.here)]
        return interface_of(reached[0]) if reached else None


def _nothing() -> None:
    """Outside a run an interrupt raises by itself."""


def _lose(follower: _Follower) -> None:
    """Its rank counts as ended: it ends by itself, and nothing more can be learned of it."""
    if follower.remote is not None:
        follower.remote.say(Lost(follower.since, -signal.SIGKILL, str(follower.facts["host"]), str(follower.lost)))
        follower.remote.end(-signal.SIGKILL)
        follower.remote = None


@contextlib.contextmanager
def connect(job: Job) -> Iterator[Lead]:
    """Lead the job for as long as the context lasts; the followers leave with its end.

    The exit status that they leave with follows from what ends the context; see `ended`.
    """
    with Signals() as signals:  # one that comes outside a run must not keep the others from being told
        with signals.raising():
            lead = Lead(job, *open_meeting(job))
        try:
            with signals.raising():
                yield lead
        except BaseException as error:
            lead.over(ended(error), INTERRUPTED_SECONDS if signals.received else FAREWELL_SECONDS)
            raise
        lead.over(lead.status, FAREWELL_SECONDS)


def ended(error: BaseException) -> int:
    """The exit status of a command that an exception ends, as cli.py gives it."""
    if isinstance(error, ShardlabError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1
