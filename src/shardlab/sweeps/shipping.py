"""Bringing a sweep's runs to MLflow beside its jobs: a run's rest while the next one has its slot, and what an
earlier launcher could not bring any more."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from shardlab.launch.streams import tell
from shardlab.tracking.mlflow_sink import Backlog, Sink

MOST_WARNINGS = 3


class _Ships(Protocol):
    @property
    def is_done(self) -> bool: ...

    def finish(self, give_up: Callable[[], bool]) -> str | None: ...


class Shipping:
    """What is on its way. Several threads may add to it."""

    def __init__(self) -> None:
        self._ships: list[_Ships] = []

    def later(self, sink: Sink) -> None:
        """Take a run that has ended."""
        sink.close()
        self._ships = [each for each in self._ships if not each.is_done]
        self._ships.append(sink)

    def backlog(self, folders: Sequence[Path]) -> None:
        """Take runs of an earlier launcher."""
        if folders:
            self._ships.append(Backlog(folders))

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Wait until MLflow has everything, and warn of what it has not. give_up: asked whether to wait no more."""
        warnings = [warning for each in self._ships if (warning := each.finish(give_up)) is not None]
        if len(warnings) > MOST_WARNINGS:
            rest = len(warnings) - MOST_WARNINGS
            warnings[MOST_WARNINGS:] = [f"so it is with {rest} more; the same command ships them"]
        for warning in warnings:
            tell(f"warning: {warning}", sys.stderr)
