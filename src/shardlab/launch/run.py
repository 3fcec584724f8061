"""A run's life: data, folder, ranks, end.

The order is what makes every promise true. Wrong data ends the command before there is a folder or a process. The
folder is complete before the first rank starts. The ranks write the record; the launcher, which outlives them all,
writes its `end` once they are gone and then has MLflow show the same. Whatever happens in between, an end is written.
"""

import errno
import sys
import time
from pathlib import Path
from signal import Signals as Signal
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from shardlab.config.compose import Composed
from shardlab.config.schema import Config
from shardlab.data.prepare import prepare
from shardlab.data.prepared import read_meta
from shardlab.errors import ShardlabError
from shardlab.launch.folder import make_folder, refuse_used
from shardlab.launch.job import Job
from shardlab.launch.progress import Progress, shown
from shardlab.launch.ranks import RanksFailed, run_ranks
from shardlab.launch.signals import Signals, Stopped
from shardlab.launch.streams import open_missing, tell
from shardlab.tracking.mlflow_sink import Sink, where_to_look
from shardlab.tracking.record import EVENTS, EventLog, RunRecord
from shardlab.tracking.store import store_of
from shardlab.training.length import run_length

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead

TRAIN_RANK = "shardlab.training.loop:train_rank"
"""What each rank runs. A name: importing it would bring torch into the launcher."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says when a disk or the user's part of it is full."""


class RunFailed(Exception):  # noqa: N818 - it says what happened
    """A run was started and failed. record: what it wrote; reason: one line with the first cause."""

    def __init__(self, record: RunRecord, reason: str) -> None:
        super().__init__(record, reason)
        self.record, self.reason = record, reason

    def __str__(self) -> str:
        return f"{self.record.name} failed: {self.reason} (more in {self.record.folder}/rank-*.log)"


def run(
    composed: Composed, *, job: Job | None = None, hydra: DictConfig | None = None, lead: "Lead | None" = None
) -> RunRecord:
    """Train as a checked config says, and return the run's record.

    job: what a sweep tells the run, if it is one of its jobs
    hydra: Hydra's own node of the config, to be kept in the run folder
    lead: of the processes that start the ranks, if there are several; else this one does

    Raises ShardlabError for what the user can mend, before or after the ranks have started; RunFailed;
    KeyboardInterrupt, or SystemExit(128 + signal) after SIGTERM or SIGHUP; Stopped, if the sweep has ended it. The
    run's end is written in every case.
    """
    open_missing()
    config = composed.config
    folder = Path(config.run_dir)
    refuse_used(folder)
    with Signals() as signals:
        with signals.raising():
            data_dir = prepare_data(config)
        data = read_meta(data_dir)
        if lead is not None:
            with signals.raising():
                lead.prepare(config, data.fingerprint, signals.check)
        run_length(config, data)  # too short a run is the user's to mend, before there is a folder
        if job is not None:
            job.begin()
        name = make_folder(folder, composed, data, job, hydra)
        sink = Sink(folder, store_of(config.tracking)) if config.tracking.name == "mlflow" else None
        shown = job is not None and job.shown  # by the sweep
        progress = None if shown else Progress(folder, name)
        if not shown:
            ranks = f"{config.ranks} rank{'s' if config.ranks > 1 else ''}"
            tell(f"{name}: starting {ranks} on {config.runtime.device.name}, {folder}", sys.stderr)

        def watch() -> None:
            if progress is not None:
                progress.update()
            if sink is not None:
                sink.start()

        status: str = "FAILED"
        reason: str | None = None
        ended_by: BaseException | None = None
        unwritten: str | None = None
        started = time.monotonic()
        try:
            signals.check()
            if lead is not None:
                with signals.raising():
                    lead.begin(folder, signals.check)
            arguments = (config, folder.absolute(), data_dir)
            run_ranks(
                TRAIN_RANK,
                arguments,
                config.ranks,
                log_dir=folder.absolute(),
                poll=watch,
                environment=None if job is None else job.environment,
                cores=None if job is None else job.cores,
                timeout=config.runtime.timeout,
                answer=None if job is None else job.answer,
                stop=None if job is None else job.stop,
                start=None if lead is None else lead.start,
                elsewhere=None if lead is None else lead.ask_stacks,
            )
            status = "FINISHED"
        except RanksFailed as failed:
            reason, ended_by = failed.user_error or failed.reason, failed
        except (KeyboardInterrupt, SystemExit) as interrupted:
            status, reason, ended_by = "KILLED", "interrupted", interrupted
            if isinstance(interrupted, SystemExit):
                reason = f"interrupted by {Signal(int(interrupted.code or 0) - 128).name}"
        except ShardlabError as error:  # of another host: it doesn't see the run folder
            reason, ended_by = str(error), error
        except Stopped as stopped:
            status, reason, ended_by = "KILLED", stopped.reason, stopped
        except OSError as error:
            reason = f"the launcher raised {type(error).__name__}: {error}"
            if error.errno not in FULL:
                raise
            ended_by = error
        except BaseException as error:
            reason = f"the launcher raised {type(error).__name__}: {error}"
            raise
        finally:
            if progress is not None:
                progress.close()
            try:
                end(folder, status, reason, time.monotonic() - started)
            except OSError as error:  # a full disk
                unwritten = f"the record's end can't be written: {error.strerror or error}"
            seen, warning = signals.count, None
            if sink is not None:
                if job is not None and job.later is not None:
                    job.later(sink)
                else:
                    warning = sink.finish(lambda: signals.count > seen)
        record = RunRecord.load(folder)
        if job is None:  # else the sweep does
            say(record, reason if status == "KILLED" or signals.received is not None else None)
        if warning is not None:
            tell(f"warning: {warning}", sys.stderr)
    signals.check()  # one that came after the ranks had ended changes no record, but ends the command
    if unwritten is not None and not isinstance(ended_by, (KeyboardInterrupt, SystemExit, Stopped)):
        raise RunFailed(record, f"{reason}; {unwritten}" if reason else unwritten) from ended_by
    if ended_by is None:
        return record
    if isinstance(ended_by, RanksFailed):
        if ended_by.user_error is not None:
            raise ShardlabError(ended_by.user_error) from ended_by
        raise RunFailed(record, ended_by.reason) from ended_by
    if isinstance(ended_by, OSError):
        raise RunFailed(record, str(reason)) from ended_by
    raise ended_by


def prepare_data(config: Config) -> Path:
    """The folder with the tokens that a run needs; they are made if they are not there. Raises ShardlabError."""
    return prepare(config.dataset, global_batch=config.trainer.global_batch)


def end(folder: Path, status: str, reason: str | None, seconds: float) -> None:
    """Write the record's last event, once no rank is left; a line that a killed rank has torn is cut."""
    log = EventLog(folder / EVENTS)
    log.write("end", status=status, reason=reason, seconds=seconds)
    log.close()


def say(record: RunRecord, reason: str | None) -> None:
    """Tell the user how the run ended and where to look: results on standard output, the rest on standard error.

    reason: why it ended, where no exception will say it: an interrupt speaks for itself only
    """
    seconds = record.events[-1].get("seconds", 0.0) if record.events else 0.0
    line = f"{record.name} {record.status.lower()} after {len(record.steps)} steps in {seconds:.1f} s"
    if record.status == "RUNNING":
        line = f"{record.name}: {len(record.steps)} steps are in the record, and no end"
    if rate := record.tokens_per_s:
        line += f", {rate:,.0f} tokens/s"
    if record.peak_memory:
        line += ", peak memory " + ", ".join(f"{size / 2**20:,.0f}" for size in record.peak_memory.values()) + " MiB"
    lines = [line]
    for split in ("val", "test"):
        if evaluations := record.evals(split):
            best = record.best or {}
            chosen = next((found for found in evaluations if found["step"] == best.get("step")), evaluations[-1])
            lines.append(f"  {split:<5} {shown(chosen)} (step {chosen['step']})")
    lines.append(f"  run folder: {record.folder}")
    if look := where_to_look(record.folder):
        lines.append(f"  MLflow: {look}")
    tell("\n".join(lines), sys.stdout)
    if reason is not None:
        tell(f"{record.name} {record.status.lower()}: {reason}", sys.stderr)
