"""`shardlab WORDS...` whose ranks meet a fault: rank $FAULT_RANK meets $FAULT of launch_faults.py at step 3."""

import os
import sys
from pathlib import Path

from shardlab.config.schema import Config
from shardlab.training.place import Place


def train(place: Place, config: Config, run_dir: Path, data_dir: Path) -> None:
    """Stand for train_rank: the same with the fault."""
    from launch_faults import FAULTS

    from shardlab.training import loop

    real = loop.train_step

    def step(training, batch, number, lr):
        if number == 3:
            (run_dir / f"rank-{place.rank}.ready").write_text(str(os.getpid()))
            if place.rank == int(os.environ.get("FAULT_RANK", "-1")):
                FAULTS[os.environ["FAULT"]](place)
        return real(training, batch, number, lr)

    loop.train_step = step
    loop.train_rank(place, config, run_dir, data_dir)


if __name__ == "__main__":
    from shardlab.cli import main
    from shardlab.cluster import follow
    from shardlab.launch import run

    run.TRAIN_RANK = follow.TRAIN_RANK = "join_command:train"
    sys.exit(main())
