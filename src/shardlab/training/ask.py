"""Asking the launcher, after an evaluation, whether the run is worth going on with.

Rank 0 asks through its pipe to the launcher and the answer goes over the mesh, so that all ranks end at one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shardlab.training.pulse import beat

if TYPE_CHECKING:
    import torch

    from shardlab.parallel.mesh import Connected


@dataclass(frozen=True)
class Asked:
    """What rank 0 asks: whether to end here, after this step and with these values of its evaluation."""

    step: int
    values: dict[str, float]


_launcher: Connection[Any, Any] | None = None


def set_up(launcher: Connection[Any, Any]) -> None:
    """Have this rank ask, or hear the answer. To be called on all ranks of a run or on none."""
    global _launcher
    _launcher = launcher


def is_pruned(mesh: Connected, device: torch.device, step: int, values: dict[str, float]) -> bool:
    """Whether the run is to end here; the same on all ranks, which must all call it. False where nobody is asked."""
    if _launcher is None:
        return False
    import torch

    answer = torch.zeros((), device=device)
    if mesh.rank == 0:
        _launcher.send(Asked(step, values))
        answer += bool(_launcher.recv())
        beat()
    return bool(mesh.agree(answer))
