"""What a command has Hydra's application run: one job here, or those of a sweep (sweeps/jobs.py).

A job never raises for its own mistake or failure: Hydra would announce it in its own words. One job keeps its error
for the command to raise.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from shardlab.cluster.room import check_processes
from shardlab.config.check import settle
from shardlab.config.compose import composed_from
from shardlab.errors import ShardlabError
from shardlab.launch.new_folder import new_folders, remove_empty
from shardlab.launch.streams import open_missing, tell

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead


class Jobs(ABC):
    """What Hydra's application runs. started: Hydra has called a job, so composing is over."""

    def __init__(self) -> None:
        self.started = False

    @abstractmethod
    def run(self, cfg: DictConfig) -> Any:
        """Run one composed job. Returns its objective, None if there is none, or the Future of it."""

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

    def run(self, cfg: DictConfig) -> None:
        """See Jobs."""
        self.started = True
        try:
            self._train(cfg)
        except Exception as error:
            self.error = error
            remove_empty(self.new)

    def _train(self, cfg: DictConfig) -> None:
        hydra = cast(DictConfig, HydraConfig.get())
        composed = composed_from(cfg, hydra)
        composed = replace(composed, config=replace(composed.config, run_dir=self.run_dir))
        settled, notes = settle(composed, None if self.lead is None else self.lead.share())
        if self.lead is not None:
            check_processes(settled.config, self.lead.job.ranks)
        for note in notes:
            tell(note, sys.stderr)

        from shardlab.launch.run import run

        run(settled, hydra=hydra, lead=self.lead)

    def status(self) -> int:
        """See Jobs."""
        if self.error is None:
            return 0
        if isinstance(self.error, ShardlabError) or not _is_failed_run(self.error):
            raise self.error
        tell(str(self.error), sys.stderr)
        return 1


def _is_failed_run(error: Exception) -> bool:
    from shardlab.launch.run import RunFailed

    return isinstance(error, RunFailed)
