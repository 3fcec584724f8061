"""`shardlab WORDS...`; if $FAULT is set, its ranks don't train, they meet, and rank $FAULT_RANK meets that fault."""

import os
import sys
from pathlib import Path

from shardlab.config.schema import Config
from shardlab.training.place import Place


def meet(place: Place, config: Config, run_dir: Path, data_dir: Path) -> None:
    """Stand for train_rank."""
    from launch_faults import work

    work(place, os.environ["FAULT"], int(os.environ["FAULT_RANK"]), run_dir)


if __name__ == "__main__":
    from launch_processes import WITH_TORCH

    from shardlab.cli import main
    from shardlab.cluster import follow
    from shardlab.launch import run

    if "FAULT" in os.environ:
        exec(WITH_TORCH)
        run.TRAIN_RANK = follow.TRAIN_RANK = "join_command:meet"
    sys.exit(main())
