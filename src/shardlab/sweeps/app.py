"""`shardlab train -m`: the command. It finds out what is to be run, takes the folder, lets Hydra go, and says the end.

The folder is fixed before Hydra composes a job: an earlier one of the same command, of which nobody else takes care
now, so that what finished there is not run again; else the one that the config names.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.cluster.room import check_parallel
from shardlab.errors import ShardlabError
from shardlab.launch.new_folder import check_place, new_folders, remove_empty
from shardlab.launch.signals import Signals, Stopped
from shardlab.launch.streams import tell
from shardlab.sweeps.books import LOCK, MULTIRUN, ROOT, SweepRunsError, earlier_sweeps
from shardlab.sweeps.jobs import SweepJobs
from shardlab.sweeps.plan import Plan, plan_of
from shardlab.sweeps.rows import DONE, counts
from shardlab.tracking.provenance import redact_file
from shardlab.tracking.record import PROVENANCE
from shardlab.tracking.sweep_parent import SWEEP

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead

MANY = 50
"""Combinations that Hydra composes, one after the other, in more time than anybody waits without a word."""

Call = Callable[[str, SweepJobs], None]


def sweep(
    words: list[str], overrides: list[str], compose: dict[str, Any], call: Call, lead: "Lead | None" = None
) -> int:
    """Run each combination; returns the exit status.

    words: after `shardlab train`; overrides: those of them that are; compose: the config's name and the user's folder
    call: calls Hydra with a folder and the jobs; lead: see hydra_app.train
    Raises ShardlabError for what can be mended before a job starts.
    """
    plan = plan_of(words, overrides, compose)
    if lead is not None:
        check_parallel(plan.parallel, lead.job.ranks)
    interrupted = True
    with Signals() as signals:
        chosen = any(word.startswith("hydra.sweep.dir=") for word in overrides)
        jobs, new = _claimed(plan, lead, chosen)
        plan, books = jobs.plan, jobs.sweep
        try:
            rows = jobs.resume()
            if rows:
                anew = (
                    "" if any(row.status not in DONE for row in rows) else "; hydra.sweep.dir=FOLDER would begin anew"
                )
                tell(f"going on with {plan.folder}: {counts(rows)}{anew}", sys.stderr)
            elif plan.total is not None and plan.total > MANY:
                tell(f"checking {plan.total} combinations before the first one starts", sys.stderr)
            try:
                with signals.raising(), contextlib.closing(jobs):
                    call(str(plan.folder), jobs)
                    interrupted = False
            except Stopped as stopped:
                interrupted = False
                tell(f"the sweep ends: {stopped.reason}; the same command would go on", sys.stderr)
            except Exception:
                interrupted = False
                raise
            status = jobs.status()
        except (KeyboardInterrupt, SystemExit):
            if books.begun:
                jobs.status()
                tell("the same command goes on from here", sys.stderr)
            raise
        finally:
            seen = signals.count
            with contextlib.suppress(OSError):
                redact_file(plan.folder / MULTIRUN)
            if books.begun:
                books.finish(
                    jobs.rows, failed=jobs.failed, interrupted=interrupted, give_up=lambda: signals.count > seen
                )
            books.release()
            if not (plan.folder / SWEEP).exists():
                (plan.folder / MULTIRUN).unlink(missing_ok=True)
                remove_empty(new)
    signals.check()  # one that came while the end was being written
    return status


def _refuse_others(folder: Path) -> None:
    """Raise ShardlabError if the folder holds a run, or a sweep of another application of Hydra's, whose notes would be
    lost."""
    if (folder / PROVENANCE).exists():
        raise ShardlabError(f"hydra.sweep.dir={folder} holds a run; give another folder")
    if (folder / MULTIRUN).exists() and not any((folder / name).exists() for name in (SWEEP, LOCK)):
        raise ShardlabError(f"hydra.sweep.dir={folder} holds another program's sweep; give another folder")


def _claimed(plan: Plan, lead: "Lead | None", chosen: bool) -> tuple[SweepJobs, list[Path]]:
    """The jobs of a sweep whose folder is ours now, and the folders that were made for it, innermost first.

    chosen: the user has named the folder; else the latest of the same sweep is taken, that nobody runs
    """

    def claim(folder: Path) -> tuple[SweepJobs, list[Path]]:
        check_place(folder, "hydra.sweep.dir")
        _refuse_others(folder)
        new = new_folders(folder)
        jobs = SweepJobs(replace(plan, folder=folder), lead)
        jobs.sweep.claim()
        return jobs, new

    if not chosen and plan.folder.is_relative_to(ROOT):
        for earlier in earlier_sweeps(plan.about["space"]):
            with contextlib.suppress(SweepRunsError):
                return claim(earlier)
    return claim(plan.folder)
