"""The trials of a search: ask the study for values, run a job with them, tell the study what came of it.

A trial's number is its job's, so job numbers go on where an earlier command stopped. With shardlab's launcher the
next trial is asked for as soon as a job ends; another launcher can only be given batches.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path
from typing import Any

import optuna
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from optuna.exceptions import OptunaError
from optuna.trial import Trial, TrialState

from hydra_plugins.shardlab_optuna._space import Space
from hydra_plugins.shardlab_optuna._study import sampler_of
from shardlab.launch.job import Answer
from shardlab.launch.streams import tell
from shardlab.sweeps import trials
from shardlab.sweeps.rows import Rows

JOB, FOLDER = "job", "folder"
"""What a trial notes of its job: its number, and the sweep's folder."""


POLL_SECONDS = 0.2
"""How often the launcher is asked whether the sweep is to end, while no job does."""


class Trials:
    """Asks, runs and tells.

    objectives: their names; folder: the sweep's; sampler, seed: see `sampler_of`; prunes: the study has a pruner
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        objectives: Sequence[str],
        folder: Path,
        *,
        sampler: str,
        seed: int,
        prunes: bool,
    ) -> None:
        self.study, self.space, self.objectives = study, space, objectives
        self.folder = str(folder.absolute())
        self.sampler, self.seed, self.prunes = sampler, seed, prunes
        self._pruned: set[int] = set()

    def run(self, count: int, launcher: Launcher, batch: int) -> None:
        """Run that many trials. batch: how many at once with a launcher that is not shardlab's.

        A job that fails is a failed trial. If this is interrupted, so are the trials whose jobs have not ended.
        """
        try:
            if hasattr(launcher, "submit"):
                self._one_by_one(count, launcher)
            else:
                self._in_batches(count, launcher, batch)
        except BaseException:
            self.end_running()
            raise

    def end_running(self, *, everywhere: bool = False) -> None:
        """Tell the study how this sweep's running trials ended: as the rows of their jobs say, else that they failed.

        A launcher that is ended may leave a job that has finished and whose trial has not been told.
        everywhere: the trials of other folders too, for nobody else can be at work on this study
        """
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        rows = {row.number: row for row in Rows(Path(self.folder)).read()} if running else {}
        for trial in running:
            if everywhere or trial.user_attrs.get(FOLDER) == self.folder:
                trials.prunes.pop(trial.number, None)
                row = rows.get(trial.number)
                status = "killed" if row is None else row.status
                value = row.objective if row is not None and status == "finished" else None
                self._tell(trial.number, value, pruned=status == "pruned")

    def _one_by_one(self, count: int, launcher: Any) -> None:
        running: dict[Future[Any], int] = {}
        while count or running:
            while count and len(running) < launcher.parallel:
                count -= 1
                trial, number, overrides = self._ask()
                if self.prunes:
                    trials.prunes[number] = self._answer(trial, number)
                running[launcher.submit(overrides, number).return_value] = number
            while not wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                launcher.check()
            ended = {future: running[future] for future in running if future.done()}
            for future, number in ended.items():
                del running[future]
                try:
                    value = future.result()
                except CancelledError:  # the launcher gave it up
                    value = None
                trials.prunes.pop(number, None)
                self._tell(number, value, pruned=number in self._pruned)

    def _in_batches(self, count: int, launcher: Launcher, batch: int) -> None:
        while count:
            asked = [self._ask() for _ in range(min(batch, count))]
            count -= len(asked)
            jobs = launcher.launch([overrides for _, _, overrides in asked], initial_job_idx=asked[0][1])
            for (_, number, _), job in zip(asked, jobs, strict=True):
                self._tell(number, _value(job, number), pruned=False)

    def _ask(self) -> tuple[Trial, int, list[str]]:
        """The next trial, its number, and its job's overrides."""
        following = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = sampler_of(self.sampler, self.seed, following)
        trial = self.study.ask(fixed_distributions=self.space.distributions)
        trial.set_user_attr(JOB, trial.number)
        trial.set_user_attr(FOLDER, self.folder)
        return trial, trial.number, self.space.overrides(self.space.values(trial.params))

    def _tell(self, number: int, value: Any, *, pruned: bool) -> None:
        """Tell the study what a job came to; one without a value for each objective has failed."""
        values = list(value) if isinstance(value, tuple | list) else [value]
        known = [float(each) for each in values if isinstance(each, int | float) and math.isfinite(each)]
        if pruned:
            self.study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
        elif len(known) == len(values) == len(self.objectives):
            self.study.tell(number, known, skip_if_finished=True)
        else:
            self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _answer(self, trial: Trial, number: int) -> Answer:
        """Whom a job asks after each evaluation, in its own thread.

        Evaluations are counted, not their steps: what a pruner compares must be as far, and steps may be of any size.
        """
        name = self.objectives[0].removeprefix("val/")
        evaluations = itertools.count(1)

        def answer(step: int, values: dict[str, float]) -> bool:
            if name not in values:
                return False
            try:
                trial.report(values[name], next(evaluations))
                hopeless = trial.should_prune()
            except OptunaError:  # the trial was told its end meanwhile, or the storage can't be had: let the job run
                return False
            if hopeless:
                self._pruned.add(number)
            return hopeless

        return answer


def _value(job: JobReturn, number: int) -> Any:
    """What a job of another launcher returned; None, and a line, for one that raised."""
    if job.status == JobStatus.COMPLETED:
        return job.return_value
    error = job._return_value
    tell(f"job {number} failed: {type(error).__name__}: {' '.join(str(error).split())}", sys.stderr)
    return None
