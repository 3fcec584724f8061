"""`shardlab WORDS...`; if $FAULT is set, its ranks don't train, they meet, and rank $FAULT_RANK meets that fault."""

import os
import sys
from pathlib import Path

from shardlab.config.schema import Config
from shardlab.training.place import Place


def meet(place: Place, config: Config, run_dir: Path, data_dir: Path) -> None:
    """Stand for train_rank: the others wait in a collective for the rank that meets the fault."""
    import torch
    import torch.distributed as dist
    from launch_faults import FAULTS

    from shardlab.training import device
    from shardlab.training.pulse import group_timeout

    device.meet(place, torch.device("cpu"), group_timeout(config.runtime.timeout))
    dist.all_reduce(torch.zeros(()))
    (run_dir / f"rank-{place.rank}.ready").write_text(str(os.getpid()))
    if place.rank == int(os.environ["FAULT_RANK"]):
        FAULTS[os.environ["FAULT"]](place)
    dist.all_reduce(torch.zeros(()))


if __name__ == "__main__":
    from launch_processes import WITH_TORCH

    from shardlab.cli import main
    from shardlab.cluster import follow
    from shardlab.launch import run

    if "FAULT" in os.environ:
        exec(WITH_TORCH)
        run.TRAIN_RANK = follow.TRAIN_RANK = "join_command:meet"
    sys.exit(main())
