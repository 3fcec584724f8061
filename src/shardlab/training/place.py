"""Where a process stands in its run: which rank it is, of how many, and where they meet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What the launcher tells a fresh rank.

    rank: 0..ranks-1
    rendezvous: an init_method of torch.distributed: a file where all are on one host, for there is no port to race for
    local_rank: its number among the ranks that see the same GPUs; None where all ranks do
    interface: by which the others are reached; None leaves the choice to gloo
    """

    rank: int
    ranks: int
    rendezvous: str
    local_rank: int | None = None
    interface: str | None = "lo"
