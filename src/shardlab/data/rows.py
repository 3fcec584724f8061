"""Feeding the rows of a pass, step after step, through torchdata's nodes.

The loader walks over step numbers and asks the dataset for each; it holds no state of its own that would have to be
saved. Starting at step k gives what an unbroken pass gives from there on, at any number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchdata.nodes import Loader, MapStyleWrapper

from shardlab.data.dataset import Batch, Dataset


@dataclass(frozen=True)
class Pass:
    """One pass over a split as the map from step number to batch that torchdata expects."""

    dataset: Dataset
    split: str
    global_batch: int
    seed: int
    epoch: int

    def __getitem__(self, step: int) -> Batch:
        """The batch of a step."""
        return self.dataset.batch(self.split, step, global_batch=self.global_batch, seed=self.seed, epoch=self.epoch)


def feed(
    dataset: Dataset, split: str, *, global_batch: int, seed: int, epoch: int, start: int = 0, stop: int | None = None
) -> Iterator[Batch]:
    """The batches of steps start..stop-1 of an epoch; stop=None, or beyond the pass, ends with the pass."""
    steps = dataset.steps(split, global_batch)
    numbers = range(start, steps if stop is None else min(stop, steps))
    return iter(Loader(MapStyleWrapper(map_dataset=Pass(dataset, split, global_batch, seed, epoch), sampler=numbers)))
