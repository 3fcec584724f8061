"""What a sweep tells a run that is one of its jobs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardlab.launch.signals import Stop

Answer = Callable[[int, dict[str, float]], bool]
"""Asked after an evaluation, with the step and its values: whether the run is to end here (it is pruned)."""


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    number: its place in the sweep; what: the overrides that are its own, as one text, for its name
    sweep: the sweep's folder, absolute
    begin: to be called before the run's folder is made: writes the sweep down if it isn't yet
    cores: the only ones that its ranks may use; None for all
    environment: set in its ranks, such as CUDA_VISIBLE_DEVICES
    stop: pulled by the sweep to end the run, such as after another job's failure
    answer: None where nobody prunes
    shown: the sweep shows its progress itself; how it ended, it always says
    """

    number: int
    what: str
    sweep: Path
    begin: Callable[[], None]
    cores: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)
    answer: Answer | None = None
    shown: bool = False
