"""Starting the ranks of a run, watching them, and ending them.

Every run gets fresh processes (fork_server.py). One bad rank ends the others at once: they would only wait for it.
Nothing is left running when `run_ranks` is over, whatever ended it; and if the launcher is killed, each rank notices
by itself (rank.py). Several threads of a process may each have a run at the same time.
"""

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardlab.launch import fork_server
from shardlab.launch.cause import Death, Failure, Hang, Lost, first_cause
from shardlab.launch.fork_server import Pipe, Process, Start
from shardlab.launch.hang import Elsewhere, HangWatch
from shardlab.launch.job import Answer
from shardlab.launch.rank import Finished, Orders
from shardlab.launch.signals import Signals, Stop
from shardlab.training.ask import Asked
from shardlab.training.place import Place
from shardlab.training.pulse import Pulse

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0
"""How long the launcher looks for the cause when all that it has heard is that a connection broke."""
SETTLE_SECONDS = 0.1
"""How long it looks for an earlier one when it has heard of a cause."""
TERM_SECONDS = 1.0
"""How long a rank may take to obey SIGTERM; then SIGKILL."""
KILL_SECONDS = 5.0
"""How long to wait for SIGKILL's effect: a rank that waits inside the kernel ends when the kernel lets it."""

LOST_SECONDS = 0.5
"""How long a launcher of a job looks, when a signal comes, whether another launcher had gone before it."""


class RanksFailed(Exception):  # noqa: N818 - it says what happened
    """A rank failed, and the run with it.

    rank: the one that failed first; reason: one line that names it, or in which all ranks have ended the run
    text: its traceback, the stacks of its threads if it hung, or the end of its log
    user_error: the message, if the rank raised ShardlabError: the user can mend it
    """

    def __init__(self, rank: int, reason: str, text: str, user_error: str | None = None) -> None:
        super().__init__(rank, reason, text, user_error)
        self.rank, self.reason, self.text, self.user_error = (rank, reason, text, user_error)

    def __str__(self) -> str:
        return self.reason


@dataclass
class _Crew:
    """The started ranks, by number, and what is known of each.

    deaths: what the launcher has seen of ranks that didn't speak; answer: to rank 0's questions
    elsewhere: those that another launcher has started; hangs: the watch over the ranks' pulses
    """

    answer: Answer | None
    elsewhere: set[int] = field(default_factory=set)
    hangs: HangWatch | None = None
    processes: dict[int, Process] = field(default_factory=dict)
    pipes: dict[int, Pipe] = field(default_factory=dict)
    finished: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    deaths: dict[int, Death | Hang] = field(default_factory=dict)


def run_ranks(
    function: Callable[..., Any] | str,
    arguments: tuple[Any, ...],
    ranks: int,
    *,
    log_dir: Path,
    poll: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    cores: tuple[int, ...] | None = None,
    timeout: float | None = None,
    answer: Answer | None = None,
    stop: Stop | None = None,
    start: Start | None = None,
    elsewhere: Elsewhere | None = None,
) -> list[Any]:
    """Call function(Place, *arguments) in `ranks` fresh processes and return what each returned, by rank.

    function: importable, itself or as "module:name" (the launcher then needn't import it)
    log_dir: what rank N prints goes to rank-N.log there
    poll: called in this thread about five times a second, once all ranks are started
    environment: set in the ranks on top of this process's own; cores: the only ones that they may use, None for all
    timeout: seconds of silence (training/pulse.py) after which a rank hangs; None: nobody watches
    answer: called in this thread when rank 0 asks (training/ask.py); what it raises ends the ranks
    stop: ends them when it is pulled; start: how one rank is started, on this machine by default
    elsewhere: asks ranks that another launcher has started (they have no pid) for their stacks; see hang.py

    Raises RanksFailed with the first cause; KeyboardInterrupt or SystemExit(128 + signal) if a signal came; Stopped.
    """
    with (
        Signals(stop) as signals,
        tempfile.TemporaryDirectory(prefix="shardlab-", ignore_cleanup_errors=True) as folder,
    ):
        orders = Orders(
            function=_reference(function),
            arguments=pickle.dumps(arguments),
            environment={**os.environ, **(environment or {})},
            log_dir=log_dir,
            cores=cores,
            watched=Path(folder) if timeout is not None else None,
            asks=answer is not None,
        )
        crew = _Crew(answer)
        try:
            signals.check()
            fork_server.wake(signals)
            if timeout is not None:
                crew.hangs = HangWatch(Path(folder), log_dir, ranks, timeout, time.monotonic(), elsewhere)
            for rank in range(ranks):
                place = Place(rank, ranks, f"file://{folder}/ranks")
                crew.processes[rank], crew.pipes[rank] = (start or fork_server.start)(place, orders)
                if crew.processes[rank].pid is None:
                    crew.elsewhere.add(rank)
            _watch(crew, signals, poll)
        finally:
            _end(crew)
        _check(crew, signals)  # what came while the ranks were being ended
    if crew.failures or crew.deaths:
        raise _failed(crew, log_dir)
    return [crew.finished[rank] for rank in range(ranks)]


def _reference(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must stand at the top of a module that can be imported")
    return f"{function.__module__}:{function.__qualname__}"


def _check(crew: _Crew, signals: Signals) -> None:
    """Raise what has come, if anything, unless it followed from another launcher's end.

    torchrun ends all launchers of a host when one of them has gone: that one is the cause then, not the signal.
    """
    deadline = time.monotonic() + LOST_SECONDS
    while signals.received is not None and crew.elsewhere & crew.pipes.keys() and not _has_lost(crew):
        if (left := deadline - time.monotonic()) <= 0:
            break
        wait([pipe.fileno() for pipe in crew.pipes.values()], left)
        for rank in list(crew.pipes):
            _listen(crew, rank)
    if not _has_lost(crew):
        signals.check()


def _has_lost(crew: _Crew) -> bool:
    return any(isinstance(death, Lost) for death in crew.deaths.values())


def _watch(crew: _Crew, signals: Signals, poll: Callable[[], None]) -> None:
    """Return once every rank has ended, or soon after one has failed."""
    alive = set(crew.processes)
    next_poll = time.monotonic()
    deadline = float("inf")
    while alive and time.monotonic() < deadline:
        if (now := time.monotonic()) >= next_poll:
            poll()
            if crew.hangs is not None and deadline == float("inf"):
                found = crew.hangs.look(time.monotonic(), {rank: crew.processes[rank].pid for rank in alive})
                if found is not None:
                    crew.deaths[found[0]] = found[1]
                    return
            next_poll = now + POLL_SECONDS
        sentinels = [crew.processes[rank].sentinel for rank in alive]
        pipes = [pipe.fileno() for pipe in crew.pipes.values()]
        wait([*sentinels, *pipes, *signals.wakes], max(0.0, min(next_poll, deadline) - time.monotonic()))
        _check(crew, signals)
        for rank in list(crew.pipes):
            _listen(crew, rank)
        for rank in [rank for rank in alive if crew.processes[rank].exitcode is not None]:
            alive.remove(rank)
            _listen(crew, rank)  # its last word may have come after the look above
            if rank not in crew.finished and rank not in crew.failures and rank not in crew.deaths:
                crew.deaths[rank] = Death(time.monotonic(), crew.processes[rank].exitcode or 0)
        ends = [*crew.failures.values(), *crew.deaths.values()]
        if ends:
            echoes_only = all(end.echo for end in ends)
            deadline = min(deadline, time.monotonic() + (GRACE_SECONDS if echoes_only else SETTLE_SECONDS))
    if deadline < float("inf"):
        _check(crew, signals)  # a signal to the whole group may have ended the ranks before it woke us


def _listen(crew: _Crew, rank: int) -> None:
    """Take in what a rank has said, if anything: rank 0's questions, and from each one last word."""
    while (pipe := crew.pipes.get(rank)) is not None and pipe.poll():
        try:
            said = pipe.recv()
        except (EOFError, OSError):  # it died without a word, or in the middle of one
            said = None
        if isinstance(said, Asked):
            is_pruned = crew.answer is not None and crew.answer(said.step, said.values)
            with contextlib.suppress(OSError):  # it may have died meanwhile
                pipe.send(bool(is_pruned))
            continue
        if isinstance(said, Pulse):
            if crew.hangs is not None:
                crew.hangs.hear(rank, said.count)
            continue
        if isinstance(said, Finished):
            crew.finished[rank] = said.result
        elif isinstance(said, Failure):
            crew.failures[rank] = said
        elif isinstance(said, Lost):
            crew.deaths[rank] = said
        crew.pipes.pop(rank).close()


def _end(crew: _Crew) -> None:
    """Leave no rank running."""
    running = [process for process in crew.processes.values() if process.exitcode is None]
    for process in running:
        process.terminate()
    _join(running, TERM_SECONDS)
    running = [process for process in running if process.exitcode is None]
    for process in running:
        process.kill()
    _join(running, KILL_SECONDS)
    for rank in crew.elsewhere:
        _listen(crew, rank)  # that its launcher is lost may show only now, after others have failed of it
    for pipe in crew.pipes.values():
        pipe.close()
    crew.pipes.clear()
    for process in crew.processes.values():
        if process.exitcode is not None:
            process.close()  # a rank whose fork server was killed counts as ended; it dies of this, see rank.py


def _join(processes: list[Process], seconds: float) -> None:
    """Wait so long, at most, for the end of all."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _failed(crew: _Crew, log_dir: Path) -> RanksFailed:
    rank, cause = first_cause(crew.failures, crew.deaths)
    text = "" if isinstance(cause, Death) else cause.text
    if isinstance(cause, Failure) and cause.run_ended is not None:
        return RanksFailed(rank, cause.run_ended, "")
    if isinstance(cause, Failure):
        return RanksFailed(rank, f"rank {rank} {cause.claim}", text, cause.user_error)
    return RanksFailed(rank, f"rank {rank} {cause.summary}", text or _last_lines(log_dir / f"rank-{rank}.log"))


def _last_lines(log: Path, lines: int = 20) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
