"""The jobs of one command: Hydra calls `run` once, or once for each combination of a sweep.

A job never raises for its own mistake or failure: Hydra would announce it in its own words and, in a sweep, show
the first one only, at the end. One job keeps its error for the command to raise; a sweep's says it at once, keeps
a row and lets the others go on. An interrupt ends the whole command.
"""

import sys
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from shardlab.config.check import settle
from shardlab.config.compose import composed_from
from shardlab.errors import ShardlabError
from shardlab.launch.new_folder import new_folders as new_folders
from shardlab.launch.new_folder import remove_empty as remove_empty
from shardlab.launch.streams import open_missing, tell

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead
    from shardlab.launch.sweep import Sweep
    from shardlab.tracking.record import RunRecord


class Jobs(ABC):
    """What Hydra's application runs. started: Hydra has called a job, so composing is over."""

    def __init__(self) -> None:
        self.started = False

    @abstractmethod
    def run(self, cfg: DictConfig) -> float | None:
        """Run one composed job. Returns its objective: the best validation loss, or None if there is none."""

    @abstractmethod
    def status(self) -> int:
        """The command's exit status once Hydra is done. Raises what a single job kept."""


class OneJob(Jobs):
    """The job of a command without -m. run_dir: its folder, fixed before Hydra makes it; lead: see hydra_app.train."""

    def __init__(self, run_dir: str = "", lead: "Lead | None" = None) -> None:
        super().__init__()
        open_missing()
        self.run_dir, self.lead = run_dir, lead
        self.new = new_folders(Path(run_dir), "run_dir")
        self.error: Exception | None = None

    def run(self, cfg: DictConfig) -> float | None:
        """See Jobs."""
        self.started = True
        try:
            return best_loss(_train(cfg, self.run_dir, lead=self.lead))
        except Exception as error:
            self.error = error
            remove_empty(self.new)
            return None

    def status(self) -> int:
        """See Jobs."""
        if self.error is None:
            return 0
        if isinstance(self.error, ShardlabError) or not _is_failed_run(self.error):
            raise self.error
        tell(str(self.error), sys.stderr)
        return 1


@dataclass(frozen=True)
class Row:
    """How one job of a sweep ended. status: finished, failed or refused; what: the values that were its own."""

    number: int
    what: str
    status: str
    reason: str = ""


class SweepJobs(Jobs):
    """The jobs of a sweep, one after the other.

    folder: the sweep's; varied: the keys that take several values; ranks: the most that any job uses; parent: its
    books; lead: see hydra_app.train
    """

    def __init__(
        self, folder: Path, varied: list[str], ranks: int, parent: "Sweep", lead: "Lead | None" = None
    ) -> None:
        super().__init__()
        open_missing()
        self.folder, self.varied, self.ranks, self.parent = folder, varied, ranks, parent
        self.lead = lead
        self.rows: list[Row] = []

    def run(self, cfg: DictConfig) -> float | None:
        """See Jobs."""
        self.started = True
        hydra = cast(DictConfig, HydraConfig.get())
        number = int(hydra.job.num)
        own = [word for word in hydra.overrides.task if word.lstrip("+").partition("=")[0] in self.varied]
        what = " ".join(own or hydra.overrides.task)
        tell(f"job {number}: {what}", sys.stdout)
        folder = self.folder / str(hydra.sweep.subdir)
        try:
            record = _train(cfg, str(folder), sweep=self.parent, largest_ranks=self.ranks, lead=self.lead)
        except Exception as error:
            remove_empty([each for each in (folder, *folder.parents) if self.folder in each.parents])
            self._keep(number, what, error)
            return None
        self.rows.append(Row(number, what, "finished"))
        return best_loss(record)

    def _keep(self, number: int, what: str, error: Exception) -> None:
        """Say at once what went wrong, and keep it for the table."""
        if isinstance(error, ShardlabError):
            status, reason = "failed" if _is_of_a_rank(error) else "refused", str(error)
        elif _is_failed_run(error):
            status, reason = "failed", str(error)
        else:  # a bug: its traceback is wanted, but the other jobs are not to blame
            traceback.print_exception(error)
            status, reason = "failed", f"{type(error).__name__}: {error}"
        self.rows.append(Row(number, what, status, " ".join(reason.split())))
        tell(f"job {number} {status}: {self.rows[-1].reason}", sys.stderr)

    def status(self) -> int:
        """See Jobs: 0 if all finished, 2 if all were refused, else 1. ShardlabError if there was none."""
        if not self.rows:
            raise ShardlabError("the sweep holds no combination; give each key at least one value")
        tell(table(self.rows, self.folder), sys.stdout)
        statuses = {row.status for row in self.rows}
        if statuses == {"finished"}:
            return 0
        return 2 if statuses == {"refused"} else 1


def table(rows: list[Row], folder: Path) -> str:
    """The end of a sweep for a person: how many of each status, and a line for each job."""
    counts = Counter(row.status for row in rows)
    lines = [f"sweep {folder}: " + ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))]
    widest = max((len(row.what) for row in rows), default=0)
    lines += [f"  {row.number:>3}  {row.what:<{widest}}  {row.status:<8}  {row.reason}".rstrip() for row in rows]
    return "\n".join(lines)


def _train(
    cfg: DictConfig,
    run_dir: str,
    *,
    sweep: "Sweep | None" = None,
    largest_ranks: int | None = None,
    lead: "Lead | None" = None,
) -> "RunRecord":
    hydra = cast(DictConfig, HydraConfig.get())
    composed = composed_from(cfg, hydra)
    composed = replace(composed, config=replace(composed.config, run_dir=run_dir))
    settled, notes = settle(composed, largest_ranks=largest_ranks, room=lead.room() if lead is not None else None)
    for note in notes:
        tell(note, sys.stderr)

    from shardlab.launch.run import run

    return run(settled, sweep=sweep, hydra=hydra, lead=lead)


def _is_failed_run(error: Exception) -> bool:
    from shardlab.launch.run import RunFailed

    return isinstance(error, RunFailed)


def _is_of_a_rank(error: Exception) -> bool:
    """Whether a complaint ended a run that had been started."""
    from shardlab.launch.ranks import RanksFailed

    return isinstance(error.__cause__, RanksFailed)


def best_loss(record: "RunRecord") -> float | None:
    """The lowest validation loss of a run, or None if it was never validated."""
    return None if record.best is None else float(record.best["loss"])
