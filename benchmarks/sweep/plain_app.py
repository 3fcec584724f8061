"""The other side: what people write today. A plain Hydra application whose jobs each start torchrun."""

import subprocess
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig


@hydra.main(config_path=None, version_base="1.3")
def main(cfg: DictConfig) -> None:
    """Train plain_train.py on two ranks. cfg: `seed`, `steps`, `out`."""
    words = ["--standalone", "--nproc-per-node=2", str(Path(__file__).with_name("plain_train.py"))]
    job = [str(cfg.seed), str(cfg.steps), str(cfg.out)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words, *job], check=True, capture_output=True)


if __name__ == "__main__":
    main()
