"""A prepared dataset, opened: the rows of any step as a pure function of (seed, epoch, step).

Nothing here knows how a step is cut or who computes which row, and there is no position to save: (epoch, step) is
the position. Both kinds read memory-mapped arrays that all ranks of a machine share.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardlab.config.schema import Task
from shardlab.data.corpora import DatasetConfig, row_length
from shardlab.data.permutation import permutation
from shardlab.data.prepared import Meta, column_length, read_meta, steps_in_pass


@dataclass(frozen=True)
class Batch:
    """The rows of one step, numbered 0..rows-1 by their place, on the CPU.

    inputs: int64 [rows, seq]
    targets: int64 [rows, seq] of a language model, [rows] of a classifier
    lengths: int64 [rows]; positions from a row's length on are padding (a language model has none)
    tokens: what throughput counts: targets of a language model, unpadded input tokens of a classifier
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor
    tokens: int


class Dataset(ABC):
    """What training reads. Splits are called train, val and test.

    n_classes: 0 for a language model
    max_len: positions of the longest row
    fingerprint: of the content; facts: numbers worth logging (see prepared.Meta)
    """

    def __init__(self, folder: Path, meta: Meta, max_len: int) -> None:
        self.name = meta.name
        self.task = meta.task
        self.vocab_size = meta.vocab_size
        self.n_classes = meta.n_classes
        self.max_len = max_len
        self.fingerprint = meta.fingerprint
        self.facts = meta.facts
        self.splits = tuple(meta.counts)
        self._folder = folder
        self._meta = meta

    def steps(self, split: str, global_batch: int) -> int:
        """Steps in one pass over a split, the last of which may be short; ShardlabError if there is none."""
        return steps_in_pass(self._meta, split, global_batch=global_batch, max_len=self.max_len)

    @abstractmethod
    def dropped(self, split: str, global_batch: int) -> int:
        """Tokens of a split that no pass reads at this global batch."""

    @abstractmethod
    def batch(self, split: str, step: int, *, global_batch: int, seed: int, epoch: int) -> Batch:
        """The rows of a step, 0..steps-1, of an epoch; IndexError beyond. Only training rows depend on the seed."""

    def _check_step(self, split: str, step: int, global_batch: int) -> None:
        if not 0 <= step < self.steps(split, global_batch):
            raise IndexError(f"{self.name} {split} has {self.steps(split, global_batch)} steps, asked for step {step}")

    def _array(self, name: str) -> NDArray[Any]:
        # a plain view: numpy.memmap makes every slice slow
        return np.asarray(np.load(self._folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


class TextStream(Dataset):
    """A language model's tokens in `global_batch` columns, each read on from where the last step ended.

    The columns are those of the classic `batchify`: row b of every step is a piece of column b. Training and
    evaluation are cut alike; what is left over after equal columns is dropped and counted.
    """

    def __init__(self, folder: Path, meta: Meta, max_len: int) -> None:
        super().__init__(folder, meta, max_len)
        self._tokens = {split: self._array(split) for split in self.splits}

    def dropped(self, split: str, global_batch: int) -> int:
        """The tail after `global_batch` equal columns."""
        return len(self._tokens[split]) % global_batch

    def batch(self, split: str, step: int, *, global_batch: int, seed: int, epoch: int) -> Batch:
        """max_len positions of every column, each with the token after it as target; the last step may be shorter."""
        self._check_step(split, step, global_batch)
        length = column_length(len(self._tokens[split]), global_batch)
        columns = self._tokens[split][: length * global_batch].reshape(global_batch, length)
        start = step * self.max_len
        seq = min(self.max_len, length - 1 - start)
        piece = torch.from_numpy(columns[:, start : start + seq + 1].astype(np.int64))
        return Batch(
            inputs=piece[:, :-1].contiguous(),
            targets=piece[:, 1:].contiguous(),
            lengths=torch.full((global_batch,), seq),
            tokens=global_batch * seq,
        )


class LabelledRows(Dataset):
    """A classifier's rows, the training split in a new order every epoch, padded to the longest row of the step."""

    def __init__(self, folder: Path, meta: Meta, max_len: int) -> None:
        super().__init__(folder, meta, max_len)
        self._pieces = {split: self._array(split) for split in self.splits}
        self._starts = {split: self._array(f"{split}_starts") for split in self.splits}
        self._labels = {split: self._array(f"{split}_labels") for split in self.splits}
        self._order: tuple[tuple[int, int], NDArray[Any]] | None = None

    def dropped(self, split: str, global_batch: int) -> int:
        """None: every row is read."""
        return 0

    def batch(self, split: str, step: int, *, global_batch: int, seed: int, epoch: int) -> Batch:
        """`global_batch` rows, in the last step what is left; a row longer than max_len is cut, its end mark kept."""
        self._check_step(split, step, global_batch)
        first, last = step * global_batch, min((step + 1) * global_batch, self._meta.counts[split])
        rows = self._train_order(seed, epoch)[first:last] if split == "train" else np.arange(first, last)
        starts = self._starts[split][rows]
        uncut = self._starts[split][rows + 1] - starts
        lengths = np.minimum(uncut, self.max_len)
        places = np.arange(lengths.max())
        real = places < lengths[:, None]
        pieces = self._pieces[split]
        inputs = np.full(real.shape, self._meta.pad_id, np.int64)
        inputs[real] = pieces[(starts[:, None] + places)[real]]
        if self._meta.sep_id is not None:
            inputs[uncut > self.max_len, self.max_len - 1 :] = self._meta.sep_id
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(self._labels[split][rows]),
            lengths=torch.from_numpy(lengths),
            tokens=int(lengths.sum()),
        )

    def _train_order(self, seed: int, epoch: int) -> NDArray[Any]:
        """The order of (seed, epoch), kept until another is asked for: 10 ms for 150,000 rows."""
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), permutation(self._meta.counts["train"], seed, epoch)
        return self._order[1]


def open_dataset(folder: Path, config: DatasetConfig) -> Dataset:
    """Open the folder that `prepare(config)` returned."""
    meta = read_meta(folder)
    kind = TextStream if meta.task is Task.language_model else LabelledRows
    return kind(folder, meta, row_length(config))
