"""The best jobs that a search has found, for the summary: a sweeper leaves them here when it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Best:
    """One job that no other beats.

    number: its place in the sweep; values: of each objective, by name; params: what was searched, by key
    """

    number: int
    values: Mapping[str, float]
    params: Mapping[str, str | int | float]


found: list[Best] = []
"""Empty where nothing was searched, or no job has come to an end. Several jobs only for several objectives: none of
them is beaten in all."""


def line(best: Sequence[Best]) -> str:
    """`best: job 7, val/loss 4.21, optimizer.lr=0.0123`; for several objectives the jobs with their values only."""
    if len(best[0].values) == 1:
        params = " ".join(f"{key}={_short(value)}" for key, value in best[0].params.items())
        return f"best: job {best[0].number}, {_values(best[0])}, {params}"
    return "best, each in its way: " + "; ".join(f"job {one.number}, {_values(one)}" for one in best)


def _values(best: Best) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in best.values.items())


def _short(value: str | int | float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
