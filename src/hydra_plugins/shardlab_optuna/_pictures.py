"""A search in two pictures: how the objective went down or up, and which keys it hung on.

The tracking code attaches every picture of the sweep's folder to its parent run in MLflow.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hydra_plugins.shardlab_optuna._trials import JOB
from shardlab.launch.streams import tell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HISTORY, IMPORTANCE = "history.png", "importance.png"
BLUE, ORANGE, GREY = "#1f6fb4", "#e08214", "#8c8c8c"


def draw(study: optuna.Study, objectives: Sequence[str], folder: Path) -> None:
    """Write history.png and importance.png into the folder; neither below two completed trials."""
    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < 2:
        return
    figure, axes = _figure(len(objectives), height=3.2)
    for number, name in enumerate(objectives):
        _history(axes[number], study, number, name)
    axes[-1].set_xlabel("job")
    figure.savefig(folder / HISTORY, dpi=130)

    try:
        shares = [_importance(study, number) for number in range(len(objectives))]
    except (RuntimeError, ValueError, ImportError) as error:  # such as no variation of the objective at all
        tell(f"no {IMPORTANCE}: {str(error).splitlines()[0]}", sys.stderr)
        return
    if not all(shares):
        return
    figure, axes = _figure(len(objectives), height=1.1 + 0.34 * len(shares[0]))
    for axis, name, share in zip(axes, objectives, shares, strict=True):
        _bars(axis, name, share)
    axes[-1].set_xlabel("share of the objective's variation, %")
    figure.savefig(folder / IMPORTANCE, dpi=130)


def _figure(rows: int, height: float) -> "tuple[Figure, list[Axes]]":
    """A figure of its own, outside of pyplot: it draws to a file on any machine and changes no setting of anybody."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def _history(axes: "Axes", study: optuna.Study, which: int, name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    up = study.directions[which] == StudyDirection.MAXIMIZE
    by_state = {
        state: study.get_trials(deepcopy=False, states=(state,))
        for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    }
    complete = [(_job(trial), trial.values[which]) for trial in by_state[TrialState.COMPLETE]]
    pruned = [(_job(trial), trial.values[which]) for trial in by_state[TrialState.PRUNED] if trial.values]
    failed = [_job(trial) for trial in by_state[TrialState.FAIL]]

    best, so_far = complete[0], []
    for job, value in complete:
        if value > best[1] if up else value < best[1]:
            best = job, value
        so_far.append(best[1])
    last = max(_job(trial) for trials in by_state.values() for trial in trials)
    jobs = [job for job, _ in complete]
    axes.step([*jobs, last], [*so_far, best[1]], where="post", color=BLUE, label="best so far")

    edge = _edge([value for _, value in complete + pruned], up)
    for points, marker, color, label in (
        (complete, "o", BLUE, "completed"),
        (pruned, "v", ORANGE, "pruned, at its last value"),
    ):
        if points:
            inside = [max(value, edge) if up else min(value, edge) for _, value in points]
            axes.plot(
                [job for job, _ in points],
                inside,
                marker,
                color=color,
                alpha=0.6,
                markersize=5,
                label=label,
                clip_on=False,
            )
    if failed:  # at the foot: they have no value
        axes.plot(failed, [0.02] * len(failed), "x", color=GREY, transform=axes.get_xaxis_transform(), label="failed")
    beyond = sum(value < edge if up else value > edge for _, value in complete + pruned)
    if beyond:
        axes.set_ylim(bottom=edge if up else None, top=None if up else edge)
    better = "higher" if up else "lower"
    axes.set_title(f"best {best[1]:.5g}, job {best[0]}", loc="left", fontsize=10)
    axes.set_ylabel(f"{name}\n({better} is better{f'; {beyond} far off' if beyond else ''})", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)


def _edge(values: list[float], up: bool) -> float:
    """Where the frame ends on the worse side: values far off, such as of diverged runs, would press the rest flat."""
    low, high = np.quantile(values, [0.25, 0.75])
    reach = 3 * float(high - low)
    if reach == 0:
        return -math.inf if up else math.inf
    return max(min(values), float(low) - reach) if up else min(max(values), float(high) + reach)


def _job(trial: FrozenTrial) -> int:
    return int(trial.user_attrs.get(JOB, trial.number))


def _importance(study: optuna.Study, which: int) -> dict[str, float]:
    """Key -> its share of the objective's variation by fANOVA, 0..1, the largest last; {} where no key varied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = optuna.importance.get_param_importances(
            study,
            evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
            target=lambda trial: trial.values[which],
        )
    return dict(reversed(shares.items()))


def _bars(axes: "Axes", name: str, shares: dict[str, float]) -> None:
    percent = [100 * share for share in shares.values()]
    bars = axes.barh(list(shares), percent, color=BLUE, alpha=0.8, height=0.6)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.set_xlim(0, max(100.0, *percent))
    axes.grid(axis="y", visible=False)
    axes.set_title(f"what {name} hangs on", loc="left", fontsize=10)
