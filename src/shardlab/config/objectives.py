"""What a sweep can be asked to improve: values that every run has, each with the direction that is better.

There is no test/... among them: whoever chooses by the test split has no test split left.
"""

from collections.abc import Sequence

from shardlab.config.complaint import nearest
from shardlab.errors import ShardlabError

NAMES = {
    "val/loss": False,
    "val/perplexity": False,
    "val/accuracy": True,
    "val/f1": True,
    "val/precision": True,
    "val/recall": True,
    "train/loss": False,
    "perf/tokens_per_s": True,
    "perf/peak_memory": False,
}
"""Name -> whether more is better. val/...: the best of all evaluations; train/loss: of the last step; tokens_per_s:
the median step's; peak_memory: bytes of the rank that took most."""

LANGUAGE_MODEL, CLASSIFIER = ("val/perplexity",), ("val/accuracy", "val/f1", "val/precision", "val/recall")
"""Those that only one task has."""


def names_of(objective: object) -> list[str]:
    """sweep.objective as a list, one or several. Raises ShardlabError for what is no name."""
    names = [objective] if isinstance(objective, str) else objective
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ShardlabError(f"sweep.objective={objective} is no name; it is one of {', '.join(NAMES)}, or a list")
    return [str(name) for name in names]


def check_objective(objective: object, classifier: bool | None) -> None:
    """Raise ShardlabError for an unknown objective, one named twice, or one that the task doesn't have.

    classifier: whether the task is one; None if that isn't known yet
    """
    names = names_of(objective)
    for name in names:
        if name.startswith("test/"):
            raise ShardlabError(f"sweep.objective={name}: the test split is not to choose by; val/{name[5:]} would do")
        if name not in NAMES:
            raise ShardlabError(f"unknown sweep.objective={name}{nearest(name, NAMES)} (one of {', '.join(NAMES)})")
        if classifier is not None and name in (LANGUAGE_MODEL if classifier else CLASSIFIER):
            task = "a classifier" if classifier else "a language model"
            raise ShardlabError(f"sweep.objective={name}: {task} has none; val/loss would do")
    if len(set(names)) < len(names):
        raise ShardlabError(f"sweep.objective={names} names one twice; name each once")


def goes_up(name: str) -> bool:
    """Whether more of it is better."""
    return NAMES[name]
