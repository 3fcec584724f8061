"""The jobs of a sweep: Hydra composes each and calls `run`; the work is done in a slot of the pool, if there is one.

A job never raises for its own mistake or failure: Hydra would announce it in its own words, the first one only, at
the end. Its reason is said at once and kept as a row, and the others go on. An interrupt ends the whole command, and
so does a failure under sweep.fail_fast.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from shardlab.cluster.room import check_processes
from shardlab.config.check import settle
from shardlab.config.compose import Composed, composed_from
from shardlab.config.schema import Config
from shardlab.errors import ShardlabError
from shardlab.launch.application import Jobs
from shardlab.launch.job import Job
from shardlab.launch.new_folder import remove_empty
from shardlab.launch.signals import Signals, Stop, Stopped
from shardlab.launch.streams import open_missing, tell
from shardlab.sweeps import trials
from shardlab.sweeps.books import MULTIRUN, Sweep
from shardlab.sweeps.live import Live, live
from shardlab.sweeps.outcome import of_error, of_record
from shardlab.sweeps.plan import Plan
from shardlab.sweeps.rows import DONE, Row, table
from shardlab.sweeps.shipping import Shipping
from shardlab.sweeps.slots import Pool, Slot, slots
from shardlab.tracking.mlflow_sink import where_to_look
from shardlab.tracking.provenance import redact_file, without_credentials

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead

Objective = float | tuple[float, ...] | None
"""What a sweeper is told of a job: a value, or one for each of several objectives; None where it has none."""

POLL_SECONDS = 0.2


class SweepJobs(Jobs):
    """All jobs of one sweep.

    sweep: its books; stop: pulled when no further job is to begin; lead: see hydra_app.train
    """

    def __init__(self, plan: Plan, lead: "Lead | None" = None) -> None:
        super().__init__()
        open_missing()
        self.plan, self.lead = plan, lead
        self.sweep = Sweep(plan.folder, plan.about, plan.objectives)
        self.stop = Stop()
        self.live: Live = live(plan.total, plan.objectives)
        self._done = self.sweep.rows.finished()
        self._folders: set[Path] = set()
        self._prepared: set[str] = set()
        self._pool: Pool | None = None
        self._signals: Signals | None = None
        self._open = contextlib.ExitStack()
        self._ended_by: BaseException | None = None
        self._shipping = Shipping()
        self._since = time.time()

    def __reduce__(self) -> tuple[Callable[[Plan], "SweepJobs"], tuple[Plan]]:
        """A launcher that runs jobs in other processes, such as joblib's, sends this there. The sweep stays ours."""
        if self.lead is not None:
            raise ShardlabError("a job of several processes runs its runs itself; leave hydra/launcher as it is")
        self.sweep.begin()
        return _elsewhere, (self.plan,)

    def resume(self) -> list[Row]:
        """Go on with what an earlier call has left: settle what it was cut off in, and ship what it could not any more.

        Returns the rows there are; [] for a new sweep. Before the first job.
        """
        rows = self.sweep.resume()
        if rows:
            self.sweep.begin()
            self._done = self.sweep.rows.finished()
            self.live.know(rows)
            if self.plan.tracked:
                self._shipping.backlog(self.sweep.unshipped())
        return rows

    def open_pool(self) -> None:
        """Have the jobs run in slots from now on; nothing if they do. From the main thread; `close` ends it."""
        if self._pool is None:
            with contextlib.suppress(OSError):
                redact_file(self.plan.folder / MULTIRUN)
            self._signals = self._open.enter_context(Signals())
            self._pool = Pool(slots(self.plan.parallel))
            self._open.enter_context(self.live)
            self._open.callback(self._pool.close)

    def close(self) -> None:
        """Begin no further job, and wait for those that run and for MLflow to have those that ran."""
        self._open.close()
        with Signals() as signals:
            seen = signals.count
            self._shipping.finish(lambda: signals.count > seen)

    def wait(self, futures: "list[Future[Objective]]") -> None:
        """Return when all of them are done. Raises what an interrupt means, and Stopped after a failure that counts."""
        pending = set(futures)
        while pending:
            self.check()
            pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED).not_done
        self.check()

    @property
    def ending(self) -> bool:
        """Whether no further job is to begin."""
        interrupted = self._signals is not None and self._signals.received is not None
        return interrupted or self._ended_by is not None or self.stop.reason is not None

    def check(self) -> None:
        """Raise if the sweep is to end."""
        if self._signals is not None:
            self._signals.check()
        if self._ended_by is not None:
            raise self._ended_by
        if self.stop.reason is not None:
            raise Stopped(self.stop.reason)

    def run(self, cfg: DictConfig) -> "Objective | Future[Objective]":
        """Hydra's call for one composed job: returns its objective, or, in a pool, the Future of it."""
        ended = self._run(cfg)
        if self._pool is None or isinstance(ended, Future):
            return ended
        known: Future[Objective] = Future()  # it has nothing to run
        known.set_result(ended)
        return known

    def _run(self, cfg: DictConfig) -> "Objective | Future[Objective]":
        self.started = True
        hydra = cast(DictConfig, HydraConfig.get())
        words = [without_credentials(word) for word in hydra.overrides.task]
        own = [word for word in words if word.lstrip("+").partition("=")[0] in self.plan.varied]
        row = Row(int(hydra.job.num), " ".join(own or words), "", "running", overrides=own or words)
        subfolder = self.plan.folder / str(hydra.sweep.subdir)
        self._remove_empty(subfolder)  # Hydra makes it for each job, begun or not
        self.check()
        try:
            composed = composed_from(cfg, hydra)
            row = replace(row, hash=composed.hash)
            if (done := self._done.get(row.hash)) is not None:
                return self._skip(done, row)
            folder = free_folder(subfolder, self._folders)
            composed = replace(composed, config=replace(composed.config, run_dir=str(folder)))
            settled, notes = settle(composed, self.plan.share if self.lead is None else self.lead.share())
            if self.lead is not None:
                check_processes(settled.config, self.lead.job.ranks)
            self._prepare(settled.config)
        except ShardlabError as error:
            self._failed(row, error)
            return None
        self._folders.add(folder)
        for note in notes:
            tell(f"job {row.number}: {note}", sys.stderr)
        environment = {str(key): str(value) for key, value in hydra.job.env_set.items()}
        row = replace(row, folder=os.path.relpath(folder, self.plan.folder))

        def work(slot: Slot) -> Objective:
            whole = Slot((), ())  # each process of a job knows what of its host is its own
            return self._work(settled, row, hydra, slot if self.lead is None else whole, environment)

        return work(Slot((), ())) if self._pool is None else self._pool.submit(work)

    def _skip(self, done: Row, row: Row) -> Objective:
        """The objective of a job that finished when the same command ran before."""
        if done.number != row.number:
            self.sweep.rows.write(replace(done, number=row.number, what=row.what, overrides=row.overrides))
        self.live.ended(replace(done, number=row.number, what=row.what), again=False)
        return _value(done.objective)

    def _work(
        self, settled: Composed, row: Row, hydra: DictConfig, slot: Slot, environment: dict[str, str]
    ) -> Objective:
        """Do one job, from its row's first line to its last."""
        if self.ending:
            return None
        from shardlab.launch.run import run

        started = time.monotonic()
        folder = Path(settled.config.run_dir)
        job = Job(
            number=row.number,
            what=row.what if self.plan.varied else "",  # else they are every job's, and no part of a name
            sweep=self.sweep.folder,
            begin=self.sweep.begin,
            cores=slot.cores or None,
            environment={**environment, **slot.environment},
            stop=self.stop,
            answer=trials.prunes.get(row.number),
            later=None if self._pool is None else self._shipping.later,
            shown=self.live.shows_progress,
        )
        try:
            self.sweep.begin()
            self.sweep.rows.write(row)
            self.live.began(row, folder)
            record = run(settled, job=job, hydra=hydra, lead=self.lead)
        except (KeyboardInterrupt, SystemExit, Stopped) as end:
            if isinstance(end, SystemExit) and not _is_of_a_signal(end):
                self._failed(replace(row, seconds=time.monotonic() - started), end)
                return None
            reason = end.reason if isinstance(end, Stopped) else "interrupted"
            self._keep(replace(row, status="killed", reason=reason, seconds=time.monotonic() - started))
            if self._pool is None:
                raise
            if not isinstance(end, Stopped):
                self._ended_by = end
            return None
        except Exception as error:
            self._remove_empty(folder)
            self._failed(replace(row, seconds=time.monotonic() - started), error)
            return None
        row = of_record(replace(row, seconds=time.monotonic() - started), record, self.plan.objectives)
        self._keep(row)
        return _value(row.objective)

    def _failed(self, row: Row, error: BaseException) -> None:
        """Say at once what went wrong, and keep it for the table."""
        row, text = of_error(row, error)
        if text:
            tell(f"job {row.number}: {text}", sys.stderr)
        self._keep(row)

    def _prepare(self, config: Config) -> None:
        """Have a dataset's tokens made before a job needs them: here, Ctrl-C can cut it off. ShardlabError as there."""
        from shardlab.launch.run import prepare_data

        key = repr((config.dataset, config.trainer.global_batch))
        if self._pool is not None and self._signals is not None and key not in self._prepared:
            with self._signals.raising():
                prepare_data(config)
            self._prepared.add(key)

    def _remove_empty(self, folder: Path) -> None:
        """Remove what Hydra made for a job that came to nothing."""
        remove_empty([each for each in (folder, *folder.parents) if self.plan.folder in each.parents])

    def _keep(self, row: Row) -> None:
        try:
            self.sweep.begin()
            self.sweep.rows.write(row)
        except (OSError, ShardlabError) as error:  # a full disk, or the folder has gone
            tell(f"job {row.number} {row.status}, and its row can't be written: {error}", sys.stderr)
            self.stop.pull(f"{self.sweep.folder} can't be written")
        self.live.ended(row)
        if row.status == "failed" and self.plan.fail_fast:
            self.stop.pull(f"job {row.number} failed, and sweep.fail_fast=true")

    @property
    def rows(self) -> list[Row]:
        """The jobs that have a row, as it is now; of a grid those that the command still has."""
        total = self.plan.total
        return [row for row in self.sweep.rows.read() if total is None or row.number < total]

    @property
    def statuses(self) -> set[str]:
        """Of the jobs that count. A search does not try again what failed in an earlier call, so there only those of
        this call do."""
        return {row.status for row in self.rows if self.plan.total is not None or row.time >= self._since}

    @property
    def failed(self) -> bool:
        """Whether a job failed or was killed."""
        return bool(self.statuses & {"failed", "killed"})

    def status(self) -> int:
        """0 if all jobs finished, 2 if all were refused, else 1. ShardlabError if there was none."""
        rows = self.rows
        if not rows:
            raise ShardlabError("the sweep holds no combination; give each key at least one value")
        tell(table(rows, self.plan.folder, list(self.plan.objectives)), sys.stdout)
        looks = (where_to_look(self.sweep.folder / row.folder) for row in rows if row.folder)
        if look := next(filter(None, looks), None):
            tell(f"MLflow: {look}", sys.stdout)
        if self.statuses <= set(DONE):
            return 0
        return 2 if self.statuses == {"refused"} else 1


def _elsewhere(plan: Plan) -> SweepJobs:
    """The jobs as another process has them, whose launcher began the sweep."""
    jobs = SweepJobs(plan)
    jobs.sweep.begun = True
    return jobs


def free_folder(folder: Path, taken: set[Path]) -> Path:
    """The folder, or where an earlier try of the same job has left something, FOLDER-2 and so on.

    taken: those that are another job's, whether it has begun or not
    """
    number, free = 1, folder
    while free in taken or (free.exists() and (not free.is_dir() or any(free.iterdir()))):
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _is_of_a_signal(end: SystemExit) -> bool:
    """Whether it is what a signal to the launcher becomes, rather than somebody's sys.exit."""
    return isinstance(end.code, int) and end.code > 128


def _value(objective: list[float]) -> Objective:
    return objective[0] if len(objective) == 1 else tuple(objective) or None
