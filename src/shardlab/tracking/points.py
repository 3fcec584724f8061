"""What MLflow is told of a run: pure translations of the config and of events, without MLflow.

A point's time is its event's own, so that an event that is shipped again makes the identical point, which MLflow
keeps once.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardlab.tracking.record import Event

LONGEST_PARAM = 6000
"""Characters of a param's value; MLflow cuts longer ones with a mere warning."""


SHOWN_OF_START = ("mesh", "ranks", "parameters", "vocab_size", "total_steps", "epoch_steps", "backend", "fingerprint")
"""What of the `start` event becomes a tag; the many facts of the dataset stay in the record."""


LAUNCHER = ("host", "pid", "pid_started", "boot_id", "pid_namespace")
"""Which process runs a run; each is a tag."""


class Point(NamedTuple):
    """One value of a metric. timestamp: milliseconds."""

    key: str
    value: float
    timestamp: int
    step: int


def points(event: Event) -> Iterator[Point]:
    """The metric values that an event carries; none for most kinds."""
    kind, step = event["event"], event.get("step", 0)
    values: dict[str, Any] = {}
    if kind == "step":
        values = {f"train/{key}": event.get(key) for key in ("loss", "grad_norm", "lr", "epoch", "loss_scale")}
        if event.get("seconds"):
            values["perf/tokens_per_s"] = event["tokens"] / event["seconds"]
            values["perf/step_seconds"] = event["seconds"]
    elif kind == "eval":
        about = ("event", "time", "split", "step", "targets", "seconds")
        values = {f"{event['split']}/{key}": value for key, value in event.items() if key not in about}
    elif kind == "best":
        values = {"val/best_loss": event.get("loss")}
    elif kind == "rank":
        values = {f"perf/peak_memory_rank{event['rank']}": event.get("peak_memory")}
    for key, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield Point(key, finite(float(value)), int(event["time"] * 1000), step)


def finite(value: float) -> float:
    """Infinity as the largest number, which is how MLflow's own stores keep it; NaN stays."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def tags_of(event: Event) -> dict[str, str]:
    """What `start`, `pruned` and `end` say about the whole run, as tags."""
    if event["event"] == "start":
        return {f"shardlab.{key}": word(event[key]) for key in SHOWN_OF_START if key in event}
    if event["event"] == "pruned":
        return {"shardlab.pruned": str(event["step"])}
    if event["event"] == "end" and event.get("reason"):
        return {"shardlab.reason": str(event["reason"])[:LONGEST_PARAM]}
    return {}


def launcher_tags(launcher: Mapping[str, Any]) -> dict[str, str]:
    """Which process it was, as tags. launcher: see provenance.py"""
    return {f"shardlab.{key}": str(launcher[key]) for key in LAUNCHER if launcher.get(key)}


def launcher_of(tags: Mapping[str, str]) -> dict[str, str]:
    """What `launcher_tags` made into tags."""
    return {key: tags[f"shardlab.{key}"] for key in LAUNCHER if f"shardlab.{key}" in tags}


def params(config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The config's leaves under dotted names, and the names of those too long for a param."""
    every = {key: word(value) for key, value in leaves(config)}
    long = [key for key, value in every.items() if len(value) > LONGEST_PARAM]
    return {key: value for key, value in every.items() if key not in long}, long


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists as (dotted name, value); a list's items are numbered: betas.0"""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = False
    for key, inner in items:
        found = True
        yield from leaves(inner, f"{name}.{key}" if name else str(key))
    if not found:
        yield name, value


def source_name(command: Sequence[str]) -> str:
    """What MLflow's page shows as a run's source: of a longer text it shows what comes after the last slash."""
    words = [word for word in command[:3] if "=" not in word]
    return " ".join(word.rpartition("/")[2] for word in words) or "shardlab"


def word(value: Any) -> str:
    """A leaf as the config's YAML spells it: true, null."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
