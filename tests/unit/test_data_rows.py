"""The rows of a step: columns of a text, shuffled and padded rows, and feeding them from anywhere."""

import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from shardlab.config.schema import NsmcConfig, PydocConfig, Task, Tokenizer
from shardlab.data.cache import build_once
from shardlab.data.dataset import Batch, Dataset, open_dataset
from shardlab.data.prepared import Meta, write_rows, write_tokens
from shardlab.data.rows import feed
from shardlab.errors import ShardlabError

PAD, CLS, SEP = 90, 91, 92
ROWS = [[CLS, *range(length), SEP] for length in (3, 0, 7, 1, 5, 2, 9, 4, 6, 8, 3)]
MAX_LENGTH = 8


def text(folder: Path, tokens: int, seq_len: int) -> Dataset:
    """A language model's dataset whose tokens are 0, 1, 2, ... in every split."""

    def build(folder: Path) -> Meta:
        for split in ("train", "val", "test"):
            write_tokens(folder, split, np.arange(tokens))
        return Meta("pydoc", Task.language_model, tokens, 0, dict.fromkeys(("train", "val", "test"), tokens))

    return open_dataset(build_once(folder / "text", build), PydocConfig("pydoc", seq_len))


def rows(folder: Path) -> Dataset:
    """A classifier's dataset of ROWS in every split; a row's label is its number's parity."""

    def build(folder: Path) -> Meta:
        for split in ("train", "val", "test"):
            write_rows(folder, split, ROWS, [row % 2 for row in range(len(ROWS))])
        counts = dict.fromkeys(("train", "val", "test"), len(ROWS))
        return Meta("nsmc", Task.classifier, 100, 2, counts, pad_id=PAD, sep_id=SEP)

    config = NsmcConfig("nsmc", None, Tokenizer.trained, MAX_LENGTH, 1)
    return open_dataset(build_once(folder / "rows", build), config)


def assert_same(one: Batch, other: Batch) -> None:
    assert one.tokens == other.tokens
    for name in ("inputs", "targets", "lengths"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


SHAPES = [
    # tokens, global batch, seq_len -> seq of each step, dropped
    (103, 4, 10, [10, 10, 4], 3),
    (101, 5, 19, [19], 1),
    (42, 2, 10, [10, 10], 0),
    (44, 2, 10, [10, 10, 1], 0),
    (6, 3, 35, [1], 0),
    (9, 1, 3, [3, 3, 2], 0),
]


@pytest.mark.parametrize(("tokens", "global_batch", "seq_len", "seqs", "dropped"), SHAPES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_text_is_cut_into_columns_read_on_from_step_to_step(
    split: str, tokens: int, global_batch: int, seq_len: int, seqs: list[int], dropped: int, tmp_path: Path
) -> None:
    dataset = text(tmp_path, tokens, seq_len)
    assert dataset.steps(split, global_batch) == len(seqs)
    assert dataset.dropped(split, global_batch) == dropped
    batches = list(feed(dataset, split, global_batch=global_batch, seed=1, epoch=0))
    assert [batch.inputs.shape[1] for batch in batches] == seqs
    columns = torch.arange(tokens - dropped).view(global_batch, -1)
    assert torch.equal(torch.cat([batch.inputs for batch in batches], dim=1), columns[:, :-1])
    assert torch.equal(torch.cat([batch.targets for batch in batches], dim=1), columns[:, 1:])
    for batch, seq in zip(batches, seqs, strict=True):
        assert batch.inputs.dtype == batch.targets.dtype == batch.lengths.dtype == torch.int64
        assert batch.lengths.tolist() == [seq] * global_batch
        assert batch.tokens == global_batch * seq == batch.targets.numel()


def test_a_text_too_short_for_the_batch_is_refused_with_what_would_work(tmp_path: Path) -> None:
    dataset = text(tmp_path, 42, 10)
    assert dataset.steps("test", 21) == 1
    with pytest.raises(ShardlabError, match=r"global_batch=22 .* 42 test tokens .* at most 21 would"):
        dataset.steps("test", 22)
    with pytest.raises(ShardlabError, match="no split 'valid'; it has train, val, test"):
        dataset.steps("valid", 2)


def test_a_row_is_padded_to_the_longest_of_its_step_and_cut_with_its_end_mark(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    batches = [dataset.batch("val", step, global_batch=4, seed=1, epoch=0) for step in range(3)]
    assert batches[0].inputs.tolist() == [
        [CLS, 0, 1, 2, SEP, PAD, PAD, PAD],
        [CLS, SEP, PAD, PAD, PAD, PAD, PAD, PAD],
        [CLS, 0, 1, 2, 3, 4, 5, SEP],
        [CLS, 0, SEP, PAD, PAD, PAD, PAD, PAD],
    ]
    assert batches[0].lengths.tolist() == [5, 2, 8, 3]
    assert batches[0].tokens == 18
    assert batches[0].targets.tolist() == [0, 1, 0, 1]
    assert batches[2].inputs.tolist() == [
        [CLS, 0, 1, 2, 3, 4, 5, SEP],
        [CLS, 0, 1, 2, 3, 4, 5, SEP],
        [CLS, 0, 1, 2, SEP, PAD, PAD, PAD],
    ]
    narrow = dataset.batch("val", 5, global_batch=1, seed=1, epoch=0)
    assert narrow.inputs.tolist() == [[CLS, 0, 1, SEP]]


def order(dataset: Dataset, split: str, global_batch: int, seed: int, epoch: int) -> list[tuple[int, ...]]:
    batches = feed(dataset, split, global_batch=global_batch, seed=seed, epoch=epoch)
    return [
        (*row[:length].tolist(), target)
        for batch in batches
        for row, length, target in zip(batch.inputs, batch.lengths, batch.targets.tolist(), strict=True)
    ]


def test_training_rows_come_once_an_epoch_in_an_order_of_seed_and_epoch_alone(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    first = order(dataset, "train", 4, seed=1, epoch=0)
    assert first == order(dataset, "train", 3, seed=1, epoch=0)
    orders = [first, *(order(dataset, "train", 4, seed, epoch) for seed, epoch in [(1, 1), (2, 0), (2, 1)])]
    assert len({tuple(rows) for rows in orders}) == 4
    natural = order(dataset, "val", 4, seed=1, epoch=0)
    assert natural == order(dataset, "val", 4, seed=2, epoch=3)
    for shuffled in orders:
        assert sorted(shuffled) == sorted(natural)
    assert first == order(dataset, "train", 4, seed=1, epoch=0)


@pytest.mark.parametrize("kind", [rows, lambda folder: text(folder, 103, 5)])
def test_a_feed_from_step_k_gives_what_an_unbroken_pass_gives_from_there(kind: object, tmp_path: Path) -> None:
    assert callable(kind)
    unbroken = list(feed(kind(tmp_path), "train", global_batch=2, seed=3, epoch=1))
    for start, stop in [(0, 2), (2, None), (3, 5), (len(unbroken), None), (1, 1000)]:
        part = list(feed(kind(tmp_path), "train", global_batch=2, seed=3, epoch=1, start=start, stop=stop))
        assert len(part) == len(unbroken[start:stop])
        for one, other in zip(part, unbroken[start:stop], strict=True):
            assert_same(one, other)


def test_a_step_beyond_the_pass_is_a_bug(tmp_path: Path) -> None:
    for dataset, steps in ((rows(tmp_path), 3), (text(tmp_path, 44, 10), 2)):
        for step in (-1, steps):
            with pytest.raises(IndexError):
                dataset.batch("train", step, global_batch=4, seed=1, epoch=0)


def test_feeding_warns_of_nothing_and_costs_little(tmp_path: Path) -> None:
    dataset = text(tmp_path, 200_001, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        began = time.process_time()
        steps = sum(1 for _ in feed(dataset, "train", global_batch=20, seed=1, epoch=0))
    assert steps == 1000
    assert (time.process_time() - began) / steps < 0.001
