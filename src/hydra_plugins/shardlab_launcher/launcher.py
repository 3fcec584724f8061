"""hydra/launcher=shardlab: several jobs at once, each on its own part of the machine.

Hydra composes the jobs one after the other in this thread, and shardlab's application hands each to its pool and
returns the Future of its objective (see shardlab/sweeps/jobs.py). For any other application it is Hydra's own
launcher. A sweeper that asks for one job at a time uses `submit`, and so has a free slot filled as soon as a job ends.
"""

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

if TYPE_CHECKING:
    from shardlab.sweeps.jobs import SweepJobs


@dataclass
class ShardlabLauncherConf:
    """It has no keys of its own: sweep.parallel says how many jobs run at once."""

    _target_: str = "hydra_plugins.shardlab_launcher.launcher.ShardlabLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="shardlab", node=ShardlabLauncherConf, provider="shardlab_launcher"
)


class ShardlabLauncher(BasicLauncher):
    """See the module."""

    @property
    def parallel(self) -> int:
        """How many jobs run at once."""
        jobs = self._jobs
        return 1 if jobs is None else jobs.plan.parallel

    @property
    def _jobs(self) -> "SweepJobs | None":
        return getattr(self.task_function, "jobs", None)

    def submit(self, overrides: Sequence[str], number: int) -> JobReturn:
        """Begin job `number`. Its return_value is a Future of its objective, or the objective if it is known.

        Raises KeyboardInterrupt, SystemExit or shardlab's Stopped if the sweep is to end.
        """
        if self._jobs is not None:
            self._jobs.open_pool()
        return super().launch([list(overrides)], number)[0]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; returns when all have ended."""
        returns = [self.submit(overrides, number) for number, overrides in enumerate(job_overrides, initial_job_idx)]
        waited = {n: each.return_value for n, each in enumerate(returns) if isinstance(each.return_value, Future)}
        if self._jobs is not None:
            self._jobs.wait(list(waited.values()))
        for number, future in waited.items():
            returns[number].return_value = result_of(future)
        return returns


def result_of(future: "Future[Any]") -> Any:
    """What a job came to; None if it was never begun."""
    try:
        return future.result()
    except CancelledError:
        return None
