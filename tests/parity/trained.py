"""Training a config with real ranks for the parity tests, and the design's measure of 'the same'."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shardlab.config.check import check
from shardlab.config.compose import compose
from shardlab.data.prepare import prepare
from shardlab.launch.ranks import run_ranks
from shardlab.tracking.record import read_events
from shardlab.training.best import best_path
from shardlab.training.loop import train_rank


@dataclass(frozen=True)
class Trained:
    """What a run left behind. events: of rank 0, without times; weights: of the best model, by canonical name."""

    events: list[dict]
    weights: dict[str, Tensor]

    def column(self, key: str) -> list[float]:
        """One value of every step."""
        return [event[key] for event in self.events if event["event"] == "step"]


TIMES = ("seconds", "time", "pid", "peak_memory")


def train(folder: Path, overrides: list[str], fault: str | None = None) -> Trained:
    """Train in fresh ranks, with a fault of faults.py planted in every rank if one is named."""
    config = check(compose(["trainer.test=false", *overrides, "runtime.threads=1"]).config)
    folder.mkdir(parents=True)
    arguments = (config, folder, prepare(config.dataset))
    if fault is None:
        run_ranks(train_rank, arguments, config.ranks, log_dir=folder)
    else:
        from faults import train_with_fault

        run_ranks(train_with_fault, (fault, *arguments), config.ranks, log_dir=folder)
    events = [
        {key: value for key, value in event.items() if key not in TIMES}
        for event in read_events(folder / "events.jsonl")
    ]
    return Trained(events, load_file(best_path(folder)))


def difference(one: Trained, other: Trained) -> float:
    """The largest relative difference between two runs: losses, norms, and every final tensor; inf if one isn't finite.

    The best models must be those after the last step. A tensor's is max|a-b| / max|a|; key biases are left out, since
    their gradient is analytically zero.
    """
    apart = []
    for key in ("loss", "grad_norm"):
        a, b = one.column(key), other.column(key)
        assert len(a) == len(b) > 0
        apart += [abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)]
        assert [e["step"] for e in (*one.events, *other.events) if e["event"] == "best"][-1] == len(a)
    assert one.weights.keys() == other.weights.keys()
    for name, a in one.weights.items():
        a, b = without_key_bias(name, a.double()), without_key_bias(name, other.weights[name].double())
        apart.append(float((a - b).abs().max() / a.abs().max()))
    return max(apart) if all(math.isfinite(value) for value in apart) else math.inf


def without_key_bias(name: str, value: Tensor) -> Tensor:
    """A joint bias without its key part."""
    return value[[0, 2]] if name.endswith("qkv.bias") else value


def identical(one: Trained, other: Trained) -> bool:
    """Bit for bit: record and weights."""
    same = one.weights.keys() == other.weights.keys() and one.events == other.events
    return same and all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


def evaluation(record: Trained) -> list[dict]:
    """The numbers of each evaluation."""
    return [
        {key: value for key, value in event.items() if not isinstance(value, str)}
        for event in record.events
        if event["event"] == "eval"
    ]


def same_bits(one: Trained, other: Trained) -> bool:
    """Bit for bit: losses, norms, evaluations and weights; the mesh may differ."""
    columns = all(one.column(key) == other.column(key) for key in ("loss", "grad_norm"))
    same = columns and evaluation(one) == evaluation(other) and one.weights.keys() == other.weights.keys()
    return same and all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
