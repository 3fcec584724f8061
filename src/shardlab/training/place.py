"""Where a process stands in its run: which rank it is, of how many, and where they meet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What the launcher tells a fresh rank.

    rank: 0..ranks-1
    rendezvous: an init_method of torch.distributed (a file: no port to race for)
    """

    rank: int
    ranks: int
    rendezvous: str
