"""Runs side by side, from their records: the table that `shardlab compare` and `make demo` print.

The loss difference, the largest |a - b| / |a| over the steps, is taken against the first run above that was to be the
same: one whose config differs in nothing but how the work was split. Where there is none it shows '-'. Runs of unlike
length are compared over their common steps, and the table says how many.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.tracking.record import RunRecord

MIB = 2**20
SPLIT = ("ranks", "strategy", "run_dir", "runtime", "tracking")
"""Keys of a config that don't enter what is computed."""

CUT = ("micro_batch", "micro_batches", "test")
"""Nor do these of its trainer."""


def compare(folders: list[Path]) -> str:
    """A Markdown table of the runs in some folders, one a row. Raises ShardlabError where a folder holds no run."""
    records = [RunRecord.load(folder) for folder in folders]
    if not records:
        raise ShardlabError("nothing to compare: name at least one run")
    first: dict[str, RunRecord] = {}
    for record in records:
        first.setdefault(training_of(record), record)
    rows = [row(record, first[training_of(record)]) for record in records]
    for shown, name in zip(rows, told_apart(records), strict=True):
        shown["run"] = name
    return text_table(rows)


def told_apart(records: list[RunRecord]) -> list[str]:
    """The runs' names; of runs that share one, with the values of their configs that differ."""
    alike: dict[str, list[dict[str, object]]] = {}
    for record in records:
        alike.setdefault(record.name, []).append(flat(record.config))
    names = []
    for record in records:
        configs, own = alike[record.name], flat(record.config)
        keys = [key for key in own if key != "run_dir" and any(config.get(key) != own[key] for config in configs)]
        names.append(" ".join([record.name, *(f"{key}={own[key]}".replace(" ", "") for key in keys)]))
    return names


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A config's values by their dotted keys."""
    values: dict[str, object] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def training_of(record: RunRecord) -> str:
    """What a run was to compute, as text: its config without how it was split, where it ran and where it is kept."""
    config = {key: value for key, value in record.config.items() if key not in SPLIT}
    config["trainer"] = {key: value for key, value in config["trainer"].items() if key not in CUT}
    return json.dumps(config, sort_keys=True, default=str)


def row(record: RunRecord, reference: RunRecord) -> dict[str, str]:
    """What one run shows. reference: the run that it is held against."""
    status = record.status if record.pruned is None else f"pruned at {record.pruned}"
    shown = {"run": record.name, "status": status}
    shown["steps"] = str(len(record.losses))
    shown["last loss"] = f"{record.losses[-1]:.4f}" if record.losses else "-"
    for split in ("val", "test"):
        for metric in ("perplexity", "accuracy"):
            values = [event[metric] for event in record.evals(split) if metric in event]
            if values:
                best = values[-1] if split == "test" else (min if metric == "perplexity" else max)(values)
                shown[f"{split} {metric}"] = (
                    f"{best:.2f}"
                    if metric == "perplexity" and best < 1e6
                    else f"{best:.3g}"
                    if metric == "perplexity"
                    else f"{best:.4f}"
                )
    speed = record.tokens_per_s
    shown["tokens/s"] = f"{speed:,.0f}" if speed else "-"
    peaks = record.peak_memory
    shown["peak MiB/rank"] = " ".join(f"{peaks[rank] / MIB:.0f}" for rank in sorted(peaks)) or "-"
    shown["loss diff"] = difference(reference.losses, record.losses) if record is not reference else "-"
    return shown


def difference(reference: list[float], losses: list[float]) -> str:
    """The largest relative difference over the steps that both have; 'nan' where only one side has a number."""
    pairs = list(zip(reference, losses, strict=False))
    if not pairs:
        return "-"
    short = "" if len(reference) == len(losses) else f" ({len(pairs)} steps)"
    if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return f"nan{short}"
    finite = [(a, b) for a, b in pairs if math.isfinite(a)]
    largest = max((abs(a - b) / abs(a) if a else abs(b) for a, b in finite), default=math.nan)
    return f"{largest:.1e}{short}"


def text_table(rows: list[dict[str, str]]) -> str:
    """Markdown with aligned columns: the union of the rows' keys, in order of appearance; missing cells show '-'."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([row.get(column, "-") for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])
