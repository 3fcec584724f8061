"""A sweep's bookkeeping: one parent run in MLflow over the runs of its jobs.

The parent is made by the first job's background thread, so a sweep starts as fast as a run and a dead server does
not stop it. How the jobs ended is read from their records.
"""

import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.launch.streams import tell
from shardlab.tracking.mlflow_sink import SINK_SECONDS
from shardlab.tracking.provenance import without_credentials
from shardlab.tracking.record import PROVENANCE, RunRecord
from shardlab.tracking.store import problem, quiet
from shardlab.tracking.sweep_parent import begin_sweep, end_sweep, ship_sweep


class Sweep:
    """One sweep.

    folder: holds the folders of its jobs; command: the words that started it; space: those with several values
    begun: whether it has been written down: some job got as far as a folder
    """

    def __init__(self, folder: Path, command: list[str], space: Sequence[str] = ()) -> None:
        self.folder = folder.absolute()
        self.begun = False
        self._id = uuid.uuid4().hex
        self._command = [without_credentials(word) for word in command]
        self._space = [without_credentials(word) for word in space]

    def begin(self) -> None:
        """Write the sweep down if it isn't yet. For each job that gets as far as a folder.

        Raises ShardlabError if it can't be written, or if the folder has become another sweep's.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            begin_sweep(self.folder, {"id": self._id, "command": self._command, "space": self._space})
        except OSError as error:
            raise ShardlabError(f"hydra.sweep.dir={self.folder} can't be written: {error.strerror or error}") from error
        self.begun = True

    def finish(
        self, *, interrupted: bool = False, refused: int = 0, give_up: Callable[[], bool] = lambda: False
    ) -> str:
        """Write down how it ended, and have MLflow show it. Returns the status.

        FINISHED if no job failed; KILLED if interrupted. refused: jobs that had no run, their config being wrong.
        A server that can't be written costs one warning line; give_up: asked whether to wait for a slow one no more.
        """
        records = self._records()
        failed = sum(record.status != "FINISHED" for record in records)
        status = "KILLED" if interrupted else "FAILED" if failed else "FINISHED"
        metrics = {
            "sweep/jobs_finished": float(len(records) - failed),
            "sweep/jobs_failed": float(failed),
            "sweep/jobs_refused": float(refused),
        }
        if losses := [record.best["loss"] for record in records if record.best]:
            metrics["sweep/best_val_loss"] = min(losses)
        try:
            stores = end_sweep(self.folder, status, metrics)
        except OSError as error:  # a full disk
            tell(f"warning: the sweep's end can't be written: {error.strerror or error}", sys.stderr)
            return status
        if not records:
            return status
        problems: list[str] = []

        def ship() -> None:
            for store in stores:
                try:
                    with quiet():
                        ship_sweep(self.folder, store)
                except Exception as error:
                    problems.append(problem(store, error))

        shipping = threading.Thread(target=ship, name="mlflow sweep", daemon=True)
        shipping.start()
        deadline = time.monotonic() + SINK_SECONDS
        while shipping.is_alive() and time.monotonic() < deadline and not give_up():
            shipping.join(0.1)
        if shipping.is_alive():
            problems.append("MLflow has not answered yet")
        for line in problems:
            tell(f"warning: {line}; to ship the sweep's end later: shardlab sync {records[0].folder}", sys.stderr)
        return status

    def _records(self) -> list[RunRecord]:
        records = []
        for path in sorted(self.folder.glob(f"**/{PROVENANCE}")):
            try:
                records.append(RunRecord.load(path.parent))
            except ShardlabError:  # its launcher was killed in the first moment
                continue
        return records
