"""A follower: the launcher of one rank that does what the lead says.

It composes nothing and writes nothing; the lead explains what goes wrong. It says one line only if it can't find the
lead, or has lost it. Its rank never outlives it (launch/rank.py), and it never outlives the lead's connection.
"""

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from shardlab.cluster.environment import Job, without_job
from shardlab.cluster.meeting import find_lead, reach
from shardlab.cluster.network import interface_of, this_machine
from shardlab.cluster.remote import to_message
from shardlab.cluster.wire import Link, Message, WireError
from shardlab.config.check import visible_gpus
from shardlab.config.schema import Config
from shardlab.errors import ShardlabError
from shardlab.launch import fork_server
from shardlab.launch.hang import STOPPED
from shardlab.launch.rank import Orders
from shardlab.launch.ranks import TERM_SECONDS
from shardlab.launch.signals import Signals
from shardlab.launch.stacks import ask_stacks, state
from shardlab.launch.streams import tell
from shardlab.tracking.record import PROVENANCE
from shardlab.training import pulse
from shardlab.training.place import Place

TRAIN_RANK = "shardlab.training.loop:train_rank"
"""What a rank runs, whatever comes over the wire."""

WELCOME_SECONDS = 60.0
PATIENCE, LEAST_PATIENCE = 30.0, 5.0
"""Seconds of silence after which the other side is lost, unless the run's own time-out is short; and at least."""

PULSE_SECONDS = 1.0

SHARED_SECONDS = 10.0
"""How long to look for what the lead has written: a network file system may show it late."""

FAREWELL_SECONDS = 20.0
"""How long the lead may take to write a run's end, and then to leave; torchrun kills what is left after 30."""


def follow(job: Job) -> int:
    """Serve the lead until it says that all is over; returns the exit status, which is the lead's own."""
    with Signals() as signals:
        with signals.raising():
            address, port, token = find_lead(job)
            link = Link(reach(address, port, signals.check))
            try:
                link.send("hello", token=token, rank=job.rank, local_rank=job.local_rank, **facts())
                welcome = link.receive(WELCOME_SECONDS)
            except (OSError, EOFError, WireError) as error:
                raise ShardlabError(f"rank {job.rank}: {address}:{port} is not this job's lead ({error})") from error
            if welcome is None or welcome["kind"] != "welcome":
                why = "no answer" if welcome is None else welcome.get("reason")
                raise ShardlabError(f"rank {job.rank}: the lead at {address}:{port} refused this process: {why}")
        return _Follower(job, link, job.address, signals).serve()


def facts() -> dict[str, Any]:
    """What the lead must know of this process: its host, and what of it the rank may use."""
    return {
        "host": socket.gethostname(),
        "machine": this_machine(),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": visible_gpus(),
        "shown": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "versions": {name: version(name) for name in ("shardlab", "torch")},
    }


def patience_of(config: Config) -> float:
    """Seconds of silence after which the other side of a connection is lost: before a watch would call it a hang."""
    return max(LEAST_PATIENCE, min(PATIENCE, config.runtime.timeout / 2))


class _Follower:
    """One follower's state: the current run, and the rank in it if it has started."""

    def __init__(self, job: Job, link: Link, lead: str, signals: Signals) -> None:
        self.job, self.link, self.lead, self.signals = job, link, lead, signals
        self.events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.wake = os.pipe()
        self.patience = PATIENCE
        self.config: Config | None = None
        self.data_dir = Path()
        self.folder = Path()
        self.watched: Path | None = None
        self.next_pulse = 0.0
        self.counts: memoryview | None = None
        self.process: fork_server.Process | None = None
        self.pipe: fork_server.Pipe | None = None

    def serve(self) -> int:
        """Until the lead says that it is over, is lost, or a signal comes."""
        self.link.attend(self._put, lambda why, _: self._put({"kind": "lost", "why": why}), lambda: self.patience)
        try:
            while True:
                if self.signals.received is not None:
                    return self._interrupted()
                self._wait(None if self.counts is None else PULSE_SECONDS)
                self._relay()
                while not self.events.empty():
                    status = self._obey(self.events.get())
                    if status is not None:
                        return status
        finally:
            self._end_rank()

    def _put(self, message: Message) -> None:
        self.events.put(message)
        os.write(self.wake[1], b"!")

    def _wait(self, seconds: float | None) -> None:
        ears = [self.wake[0], *self.signals.wakes]
        if self.process is not None:
            ears += [self.process.sentinel, *([self.pipe.fileno()] if self.pipe is not None else [])]
        if self.wake[0] in wait(ears, seconds):
            os.read(self.wake[0], 4096)

    def _obey(self, message: Message) -> int | None:
        """Do what a message says. Returns the exit status if that was the last one."""
        match message["kind"]:
            case "prepare":
                threading.Thread(target=self._prepare, args=(message,), name="prepare", daemon=True).start()
            case "begin":
                threading.Thread(target=self._begin, args=(message,), name="begin", daemon=True).start()
            case "start":
                self._start(message)
            case "end" if self.process is not None and self.process.exitcode is None:
                (self.process.kill if message["signal"] == signal.SIGKILL else self.process.terminate)()
            case "ask":
                threading.Thread(target=self._tell_stack, name="stack", daemon=True).start()
            case "over":
                return self._leave(int(message["status"]))
            case "lost":
                self._end_rank()
                tell(
                    f"rank {self.job.rank} on {socket.gethostname()}: the lead (rank 0 on {self.lead}) is lost: "
                    f"{message['why']}; this rank has been ended",
                    sys.stderr,
                )
                return 1
        return None

    def _prepare(self, message: Message) -> None:
        """Take the run's config, and have its data on this host."""
        from shardlab.config.compose import to_config
        from shardlab.data.prepare import prepare
        from shardlab.data.prepared import read_meta

        host = socket.gethostname()
        try:
            self.config = to_config(cast(DictConfig, OmegaConf.create(str(message["config"]))))
            self.patience = patience_of(self.config)
            self.data_dir = prepare(self.config.dataset, global_batch=self.config.trainer.global_batch)
            found = read_meta(self.data_dir).fingerprint
            if found != message["fingerprint"]:
                raise ShardlabError(
                    f"dataset {self.config.dataset.name} has other contents on {host} (fingerprint {found}) than on "
                    f"the lead's host ({message['fingerprint']}); give all hosts the same files"
                )
            self._answer(None)
        except Exception as error:
            self._answer(error)

    def _begin(self, message: Message) -> None:
        """See that the run's folder here is the one that the lead has made."""
        self.folder = Path(message["folder"])
        deadline = time.monotonic() + SHARED_SECONDS
        while True:
            try:
                if (self.folder / PROVENANCE).read_text(encoding="utf-8") == message["provenance"]:
                    self._answer(None)
                    return
                why = f"the {PROVENANCE} there is another run's"
            except (OSError, ValueError) as error:
                why = f"{PROVENANCE} there can't be read: {getattr(error, 'strerror', None) or error}"
            if time.monotonic() > deadline:
                self._answer(
                    ShardlabError(
                        f"run_dir={self.folder} is not the lead's folder on {socket.gethostname()} ({why}); "
                        "give a run_dir on a file system that all hosts share"
                    )
                )
                return
            time.sleep(0.2)

    def _answer(self, error: Exception | None) -> None:
        values: dict[str, Any] = {"reason": None, "mendable": True}
        if error is not None:
            mendable = isinstance(error, ShardlabError)
            text = str(error) if mendable else f"{type(error).__name__}: {error}"
            values = {"reason": f"rank {self.job.rank}: {text}", "mendable": mendable}
        self._send("answer", **values)

    def _start(self, message: Message) -> None:
        """Start the rank."""
        interface = "lo" if message["one_host"] else interface_of(self.link.here)
        place = Place(self.job.rank, self.job.ranks, message["rendezvous"], message["local_rank"], interface)
        arguments = pickle.dumps((self.config, self.folder, self.data_dir))
        environment = {**without_job(os.environ), **message["environment"]}
        if message["watched"]:
            self.watched = Path(tempfile.mkdtemp(prefix="shardlab-"))
            pulse.make(self.watched / pulse.FILE, self.job.ranks)
            self.counts = pulse.counts(self.watched / pulse.FILE)
        orders = Orders(TRAIN_RANK, arguments, environment, self.folder, None, self.watched, bool(message["asks"]))
        fork_server.wake(self.signals)
        self.process, self.pipe = fork_server.start(place, orders)

    def _tell_stack(self) -> None:
        """Ask the rank where it is, and tell the lead."""
        number = self.process.pid if self.process is not None else None
        letter, text = "X", ""
        if number is not None and self.watched is not None:
            letter = state(number)
            stacks = ask_stacks({self.job.rank: number}, self.watched) if letter not in STOPPED else {}
            text = stacks[self.job.rank].text if stacks else ""
        self._send("answer", state=letter, text=text, reason=None)

    def _relay(self) -> None:
        """Tell the lead what the rank has said, and its end."""
        if self.process is None:
            return
        if self.counts is not None and time.monotonic() >= self.next_pulse:
            self.next_pulse = time.monotonic() + PULSE_SECONDS
            self._send("pulse", count=self.counts[self.job.rank])
        exitcode = self.process.exitcode  # looked at first: what it said before is then in the pipe
        if self.pipe is not None and self.pipe.poll():
            try:
                self._send(**to_message(self.pipe.recv()))
            except (EOFError, OSError):  # it died without a word, or in the middle of one
                self.pipe.close()
                self.pipe = None
        elif exitcode is not None:
            self._end_rank()

    def _send(self, kind: str, **values: Any) -> None:
        with contextlib.suppress(OSError):  # the thread that reads will say so
            self.link.send(kind, **values)

    def _end_rank(self) -> None:
        """End the rank if it is there, and tell the lead that it has ended."""
        if self.process is None:
            return
        if self.process.exitcode is None:
            self.process.terminate()
            self.process.join(TERM_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._send("exit", code=self.process.exitcode)
        self.process.close()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = self.counts = None
        if self.watched is not None:
            shutil.rmtree(self.watched, ignore_errors=True)
            self.watched = None

    def _interrupted(self) -> int:
        """A signal came to this process alone or to all: what is done to one is done to the job."""
        number = int(self.signals.received or 0)
        self._send("signal", number=number)
        self._end_rank()
        deadline = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
            while not self.events.empty():
                message = self.events.get()
                if message["kind"] == "over":
                    return self._leave(int(message["status"]))
                if message["kind"] == "lost":
                    return 128 + number
        return 128 + number

    def _leave(self, status: int) -> int:
        """Let the lead leave first: torchrun takes the first that fails for the cause, and ends the others."""
        self._end_rank()
        deadline = time.monotonic() + FAREWELL_SECONDS
        while (left := deadline - time.monotonic()) > 0 and wait([self.wake[0]], left):
            os.read(self.wake[0], 4096)
            while not self.events.empty():
                if self.events.get()["kind"] == "lost":
                    return status
        return status
