"""Whether two runs are the same run: losses, gradient norms, evaluations and final tensors, each within a bound.

One measure for the tests and for `shardlab parity`. A mesh changes nothing but the order of sums, so in fp64 what is
left is rounding of 1e-15, and the bound of 1e-9 lies far from it and further still from any mistake. What isn't
finite is never the same.

Differences are relative: |a-b| / |a| of numbers, max|a-b| / max|a| of tensors. In coarser numbers tensors are judged by
root mean squares instead: where a gradient's element is itself rounding, Adam divides it by its own size, so single
elements go anywhere, a step of the learning rate at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.tracking.record import EVENTS, read_events

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = Mapping[str, NDArray[Any]]

GROUPS = ("embedding", "attention", "feed_forward", "norms", "head")
"""The groups of tensors, in forward order."""

QUANTITIES = ("loss", "grad_norm", "evaluation", *GROUPS)
"""All that is judged, in the order of `compare`."""

BEST = Path("checkpoints", "best.safetensors")
"""Where in its folder a run keeps its best model (training/best.py, which needs torch)."""

SMALLEST = 1e-3
"""A tensor is measured by its largest element, but at least by this share of the largest of its kind in any layer: one
that has hardly left zero is all rounding."""


@dataclass(frozen=True)
class Bounds:
    """How far apart two runs may be.

    losses: of all steps, and of evaluations; norms: of all steps; first: both, of the first step, where that is less
    tensors: after the last step; by_largest: by their largest elements, else by root mean squares
    """

    losses: float
    norms: float
    tensors: float
    first: float = math.inf
    by_largest: bool = False


_NARROW = Bounds(5e-4, 5e-3, 5e-2)
BOUNDS = {
    "fp64": Bounds(1e-9, 1e-9, 1e-9, by_largest=True),
    "fp32": Bounds(1e-4, 1e-3, 5e-3, first=1e-5),
    **dict.fromkeys(("tf32", "bf16", "fp16"), _NARROW),
}
"""By precision. Those of fp32 hold for some 50 steps at a stable setting, the narrower ones for a few: rounding grows
by itself. Measured of tiny under ddp and tensor: fp32, 50 steps of SGD or AdamW, 4e-6, 4e-4 and 1e-3; bf16, 5 steps,
5e-5, 8e-4 and 2e-2 (a tensor split adds products that have been rounded already)."""


@dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    losses, norms: of each step; the norm of one that fp16 skipped is None
    evaluations: (split and step, loss)
    weights: after the last step, by canonical name
    """

    losses: list[float]
    norms: list[float | None]
    evaluations: list[tuple[str, float]]
    weights: Weights


@dataclass(frozen=True)
class Apart:
    """The distance of one quantity of two runs.

    quantity: loss, grad_norm, evaluation, or a group of tensors
    largest, at: the largest relative difference, and the step or tensor where it is
    beyond: of those that exceed their bound the first: (difference, where, bound)
    """

    quantity: str
    largest: float
    at: str
    beyond: tuple[float, str, float] | None

    @property
    def complaint(self) -> str:
        """What is beyond its bound, and where."""
        assert self.beyond is not None
        difference, at, bound = self.beyond
        return f"{self.quantity} differs by {difference:.1e} at {at}, more than {bound:.0e}"


def read_outcome(folder: Path) -> Outcome:
    """The outcome of a run that was evaluated after its last step alone, so that its best model is its last."""
    from safetensors.numpy import load_file

    return outcome_of(read_events(folder / EVENTS), load_file(folder / BEST))


def outcome_of(events: Iterable[Mapping[str, Any]], weights: Weights) -> Outcome:
    """The outcome that a run's events tell."""
    steps, evaluations = [], []
    for event in events:
        if event["event"] == "step":
            steps.append(event)
        elif event["event"] == "eval":
            evaluations.append((f"{event['split']} at step {event['step']}", event["loss"]))
    norms = [None if event.get("skipped") else event["grad_norm"] for event in steps]
    return Outcome([event["loss"] for event in steps], norms, evaluations, weights)


def compare(reference: Outcome, other: Outcome, bounds: Bounds) -> list[Apart]:
    """The distance of each quantity. Raises ValueError for runs of unlike length, or of different tensors."""
    if len(reference.losses) != len(other.losses) or not reference.losses:
        raise ValueError(f"runs of {len(reference.losses)} and {len(other.losses)} steps can't be compared")
    if reference.weights.keys() != other.weights.keys():
        raise ValueError(f"different tensors: {sorted(reference.weights.keys() ^ other.weights.keys())}")
    if [at for at, _ in reference.evaluations] != [at for at, _ in other.evaluations]:
        raise ValueError("different evaluations")
    found = []
    for quantity, a, b, bound in (
        ("loss", reference.losses, other.losses, bounds.losses),
        ("grad_norm", reference.norms, other.norms, bounds.norms),
    ):
        steps = [(d, f"step {n}", bound) for n, d in enumerate(map(of_numbers, a, b), 1)]
        steps[0] = (*steps[0][:2], min(bound, bounds.first))
        found.append(_apart(quantity, steps))
    evaluated = zip(reference.evaluations, other.evaluations, strict=True)
    found.append(_apart("evaluation", [(of_numbers(a, b), at, bounds.losses) for (at, a), (_, b) in evaluated]))
    tensors: dict[str, list[tuple[float, str, float]]] = {group: [] for group in GROUPS}
    for name, difference in of_tensors(reference.weights, other.weights, bounds.by_largest).items():
        tensors[group_of(name)].append((difference, name, bounds.tensors))
    return found + [_apart(group, each) for group, each in tensors.items()]


def _apart(quantity: str, differences: list[tuple[float, str, float]]) -> Apart:
    largest, at, _ = max(differences, default=(0.0, "-", 0.0))
    return Apart(quantity, largest, at, next((each for each in differences if each[0] > each[2]), None))


def of_numbers(a: float | None, b: float | None) -> float:
    """|a-b| / |a|; inf where one isn't finite, or one alone is None."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    if a == b:
        return 0.0
    return abs(a - b) / abs(a) if a else math.inf


def of_tensors(a: Weights, b: Weights, by_largest: bool = True) -> dict[str, float]:
    """max|a-b| / max|a| of each tensor, or with root mean squares for max; inf where an element isn't finite.

    See SMALLEST for the divisor.
    """
    size = _largest if by_largest else _root_mean_square
    ours = {name: judged(name, value).astype("float64") for name, value in a.items()}
    kinds: dict[str, float] = {}
    for name, value in ours.items():
        kinds[kind_of(name)] = max(kinds.get(kind_of(name), 0.0), size(value))
    differences = {}
    for name, value in ours.items():
        apart = size(value - judged(name, b[name]))
        divisor = max(size(value), SMALLEST * kinds[kind_of(name)])
        differences[name] = apart / divisor if divisor else math.inf if apart else 0.0
    return {name: value if math.isfinite(value) else math.inf for name, value in differences.items()}


def _largest(x: NDArray[Any]) -> float:
    return float(abs(x).max())


def _root_mean_square(x: NDArray[Any]) -> float:
    return math.sqrt(float((x * x).mean()))


def judged(name: str, value: NDArray[Any]) -> NDArray[Any]:
    """What is judged of a tensor: a joint bias without its key part, whose gradient is analytically zero.

    Adding the same number to all scores of a query leaves their softmax as it is: what a key bias gets is rounding.
    """
    return value[[0, 2]] if name.endswith("qkv.bias") else value


def kind_of(name: str) -> str:
    """A canonical name without its layer."""
    return re.sub(r"^layers\.\d+\.", "", name)


def group_of(name: str) -> str:
    """The group of GROUPS that a canonical name belongs to."""
    first = kind_of(name).split(".")[0]
    if first.endswith("norm"):
        return "norms"
    return "embedding" if first == "positions" else first
