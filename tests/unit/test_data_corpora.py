"""What each corpus makes of its files: formats, tokens, splits, and the figures that are published."""

import itertools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardlab.config.schema import NsmcConfig, SyntheticConfig, Task, TextConfig, Tokenizer, Tokens
from shardlab.data import words
from shardlab.data.corpora import nsmc, pydoc, synthetic, wikitext2
from shardlab.data.dataset import LabelledRows, open_dataset
from shardlab.data.permutation import permutation, raw, uniform
from shardlab.data.prepare import prepare
from shardlab.data.prepared import Meta, read_meta
from shardlab.data.wordpiece import WordPieces
from shardlab.errors import ShardlabError

DATA = Path(os.environ.get("SHARDLAB_DATA", "/nonexistent"))
needs_wikitext2 = pytest.mark.skipif(not (DATA / "wikitext-2").is_dir(), reason="$SHARDLAB_DATA has no wikitext-2")
needs_nsmc = pytest.mark.skipif(not (DATA / "nsmc").is_dir(), reason="$SHARDLAB_DATA has no nsmc")

HEADER = "id\tdocument\tlabel\n"
SYNTHETIC = SyntheticConfig("synthetic", Task.classifier, seq_len=12, train_tokens=20000, train_rows=2000)


def stored(folder: Path, name: str) -> list[int]:
    numbers: list[int] = np.load(folder / f"{name}.npy").tolist()
    return numbers


# nsmc

WRONG_RATINGS = [
    # content, what the error says after "ratings_train.txt line "
    (HEADER + "1\t좋다\t1\n2\t나쁘다\t2\n", "3: label is '2', expected 0 or 1"),
    (HEADER + "1\t좋다\t\n", "2: label is '', expected 0 or 1"),
    (HEADER + "1\t좋다\n", "2: 2 columns between tabs, expected 3"),
    (HEADER + "1\t좋\t다\t1\n", "2: 4 columns between tabs, expected 3"),
    (HEADER + "1\t좋다\t1\n\n2\t나쁘다\t0\n", "3: 1 columns between tabs, expected 3"),
    ("id\tdocument\n1\t좋다\n", r"1: header is 'id\tdocument', expected id TAB document TAB label"),
    ("1\t좋다\t1\n", r"1: header is '1\t좋다\t1'"),
    (HEADER, "1: no rows after the header"),
    ((HEADER + "1\t좋다\t1\n").encode("cp949"), "2: not UTF-8"),
]


@pytest.mark.parametrize(("content", "reason"), WRONG_RATINGS)
def test_wrong_ratings_are_refused_with_name_line_and_reason(
    content: str | bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ratings_train.txt", "ratings_test.txt"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ShardlabError) as raised:
        prepare(NsmcConfig("nsmc", str(tmp_path), Tokenizer.trained, 16, 1))
    assert f"dataset nsmc: ratings_train.txt line {reason}" in str(raised.value)


def test_well_formed_ratings_that_are_not_nsmc_are_refused_too(tmp_path: Path) -> None:
    for name in ("ratings_train.txt", "ratings_test.txt"):
        (tmp_path / name).write_text(HEADER + "1\t좋다\t1\n")
    with pytest.raises(ShardlabError, match=r"another file than the published ratings_train\.txt"):
        prepare(NsmcConfig("nsmc", str(tmp_path), Tokenizer.trained, 16, 1))


def test_quotes_and_empty_documents_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ratings.txt"
    path.write_bytes((HEADER + '1\t"그 ""영화""\t1\r\n2\t\t0').encode())
    ratings = nsmc.read_ratings(path)
    assert ratings.documents == ['"그 ""영화""', ""]
    assert ratings.labels == [1, 0]


def ratings_of(rows: int) -> nsmc.Ratings:
    return nsmc.Ratings([f"{row}번 영화" for row in range(rows)], [row % 2 for row in range(rows)])


def test_validation_is_a_fixed_part_of_train_and_shares_no_row_with_it() -> None:
    train = ratings_of(50)
    splits = nsmc.split_ratings(train, ratings_of(3), 10)
    assert splits == nsmc.split_ratings(train, ratings_of(3), 10)
    assert splits["test"] == ratings_of(3)
    assert len(splits["val"].labels) == 10
    both = splits["train"].documents + splits["val"].documents
    assert sorted(both) == sorted(train.documents)
    for split in ("train", "val"):
        for document, label in zip(splits[split].documents, splits[split].labels, strict=True):
            assert train.labels[train.documents.index(document)] == label


@pytest.mark.parametrize("validation_rows", [0, 50, 51, -1])
def test_validation_must_leave_rows_to_train_on(validation_rows: int) -> None:
    with pytest.raises(ShardlabError, match=r"dataset\.validation_rows=.* 1 to 49 would"):
        nsmc.split_ratings(ratings_of(50), ratings_of(3), validation_rows)


def build_small_nsmc(folder: Path) -> Meta:
    """nsmc from six rows, with a vocabulary of single characters and a few pieces."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"영화좋다나쁘", "##화", "##다", "##쁘", "."]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    rows = ["영화", "", "좋다 영화 .", "나쁘다", "영화 영화 영화", "뭐"]
    for name in ("ratings_train.txt", "ratings_test.txt"):
        lines = "".join(f"{row}\t{text}\t{row % 2}\n" for row, text in enumerate(rows))
        (folder / name).write_text(HEADER + lines)
    files = {name: folder / name for name in ("vocab.txt", "ratings_train.txt", "ratings_test.txt")}
    meta = nsmc.build(NsmcConfig("nsmc", None, Tokenizer.multilingual_bert, 16, 2), files, folder)
    meta.write(folder)
    return meta


def test_rows_are_pieces_between_cls_and_sep_and_empty_ones_stay(tmp_path: Path) -> None:
    meta = build_small_nsmc(tmp_path)
    assert (meta.n_classes, meta.pad_id, meta.sep_id, meta.vocab_size) == (2, 0, 3, 14)
    assert meta.counts == {"train": 4, "val": 2, "test": 6}
    starts, pieces = stored(tmp_path, "test_starts"), stored(tmp_path, "test")
    rows = [pieces[a:b] for a, b in itertools.pairwise(starts)]
    assert rows[:4] == [[2, 4, 10, 3], [2, 3], [2, 6, 11, 4, 10, 13, 3], [2, 8, 12, 11, 3]]
    assert rows[5] == [2, 1, 3]
    assert stored(tmp_path, "test_labels") == [0, 1, 0, 1, 0, 1]
    assert meta.facts["test_empty_documents"] == 1
    assert meta.facts["test_unknown"] == 1
    assert meta.facts["test_longest_row"] == 8
    assert meta.facts["test_documents_in_train"] == 4


def test_a_trained_vocabulary_is_the_same_every_time_and_knows_every_frequent_character() -> None:
    texts = [f"{chr(0xAC00 + i % 150)}{chr(0xAC00 + 3 * i % 150)} 영화 {i % 7}" for i in range(1500)]
    rare = ["뷁", *(f"영{chr(0xB000 + i)}" for i in range(200))]
    one, two = WordPieces.train([*texts, *rare]), WordPieces.train([*texts, *rare])
    assert one.words == two.words
    assert one.words[:4] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    encoded = one.encode(texts)
    assert encoded == two.encode(texts)
    assert not any(one.unknown_id in row for row in encoded)
    assert all(row[0] == 2 and row[-1] == one.sep_id for row in encoded)
    assert one.encode(["뷁"]) == [[2, one.unknown_id, one.sep_id]]


@needs_nsmc
def test_nsmc_has_its_published_rows_and_pieces(tmp_path: Path) -> None:
    config = NsmcConfig("nsmc", None, Tokenizer.multilingual_bert, 32, 10000)
    folder = prepare(config)
    meta = read_meta(folder)
    assert meta.counts == {"train": 140_000, "val": 10_000, "test": 50_000}
    assert meta.vocab_size == 119_547
    assert meta.facts["train_empty_documents"] + meta.facts["val_empty_documents"] == 5  # type: ignore[operator]
    assert meta.facts["test_empty_documents"] == 3
    pieces = WordPieces.read(folder / "vocabulary.txt")
    assert pieces.encode(["청춘 영화의 최고봉."])[0] == [101, 9751, 97707, 42428, 10459, 83491, 118989, 119, 102]
    batch = open_dataset(folder, config).batch("test", 0, global_batch=64, seed=1, epoch=0)
    assert batch.inputs.shape == (64, 32)
    assert set(batch.inputs[batch.lengths == 32, 31].tolist()) == {102}


# language models


def test_the_vocabulary_is_by_frequency_from_train_alone_and_others_are_unknown(tmp_path: Path) -> None:
    tokens = {"train": ["b", "a", "a", "c", "b", "a", "<unk>"], "val": ["c", "new", "a"], "test": ["new"]}
    meta = words.write_corpus("wikitext2", tokens, tmp_path)
    assert (tmp_path / "vocabulary.txt").read_text().split("\n") == ["<unk>", "a", "b", "c", ""]
    assert stored(tmp_path, "train") == [2, 1, 1, 3, 2, 1, 0]
    assert stored(tmp_path, "val") == [3, 0, 1]
    assert meta.facts["val_unknown"] == 1
    assert meta.counts == {"train": 7, "val": 3, "test": 1}


def test_words_end_every_line_with_eos_and_basic_english_drops_empty_lines() -> None:
    lines = [" = Title = ", "", " It 's , well ."]
    assert words.plain_words(lines) == ["=", "Title", "=", "<eos>", "<eos>", "It", "'s", ",", "well", ".", "<eos>"]
    assert words.basic_english(lines) == ["=", "title", "=", "it", "'", "s", ",", "well", "."]


@needs_wikitext2
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "counts"),
    [
        (Tokens.basic_english, 28_782, {"train": 2_049_990, "val": 214_417, "test": 241_859}),
        (Tokens.words, 33_278, {"train": 2_088_628, "val": 217_646, "test": 245_569}),
    ],
)
def test_wikitext2_has_its_published_size(tokens: Tokens, vocabulary: int, counts: dict[str, int]) -> None:
    meta = read_meta(prepare(TextConfig("wikitext2", None, tokens, 35)))
    assert (meta.vocab_size, meta.counts) == (vocabulary, counts)


@needs_wikitext2
def test_a_changed_wikitext2_is_refused(tmp_path: Path) -> None:
    for file in wikitext2.FILES.values():
        (tmp_path / file.name).write_bytes((DATA / "wikitext-2" / file.name).read_bytes() + b" ")
    with pytest.raises(ShardlabError, match=r"train\.txt is another file .* 10797149 bytes"):
        prepare(TextConfig("wikitext2", str(tmp_path), Tokens.words, 35))


def test_no_telling_line_of_pydoc_stands_in_two_splits() -> None:
    texts = pydoc.topics()
    sizes = {name: len(words.basic_english(text.split("\n"))) for name, text in texts.items()}
    place = pydoc.assign(texts, sizes)
    splits_of: dict[str, set[str]] = {}
    share: Counter[str] = Counter()
    for name, text in texts.items():
        share[place[name]] += sizes[name]
        for line in text.split("\n"):
            if len(line.strip()) >= pydoc.TELLING:
                splits_of.setdefault(line.strip(), set()).add(place[name])
    assert max(map(len, splits_of.values())) == 1
    for split, wanted in pydoc.SHARES.items():
        assert share[split] / share.total() == pytest.approx(wanted, abs=0.02)


def test_topics_that_share_text_through_a_third_are_one_group() -> None:
    line, other = "x" * pydoc.TELLING, "y" * pydoc.TELLING
    texts = {"a": f"{line}\nshort", "b": f"  {line}\n{other}", "c": other, "d": "short", "e": "z" * 50}
    assert pydoc.sharing_groups(texts) == [["a", "b", "c"], ["d"], ["e"]]


# synthetic


def test_the_chains_entropy_is_what_a_long_walk_shows() -> None:
    law = synthetic.transitions()
    rate, of_one = synthetic.entropies(law)
    symbols = synthetic.walk(law, 200_000, stream=7)
    older, last, following = symbols[:-2], symbols[1:-1], symbols[2:]
    assert -np.log(law[older, last, following]).mean() == pytest.approx(rate, rel=0.005)
    pairs = np.zeros((synthetic.SYMBOLS, synthetic.SYMBOLS))
    np.add.at(pairs, (last, following), 1)
    blind = pairs / pairs.sum(axis=1, keepdims=True)
    assert -np.log(blind[last, following]).mean() == pytest.approx(of_one, rel=0.005)
    assert of_one > 1.2 * rate


def test_a_chain_without_memory_has_the_entropy_of_its_symbols() -> None:
    law = np.broadcast_to([0.5, 0.25, 0.25], (3, 3, 3))
    assert synthetic.entropies(law) == pytest.approx((1.5 * np.log(2), 1.5 * np.log(2)))


def test_the_best_loss_lies_between_the_rate_and_the_entropy_of_one(tmp_path: Path) -> None:
    config = replace(SYNTHETIC, task=Task.language_model, seq_len=4)
    facts = synthetic.build(config, {}, tmp_path).facts
    rate, of_one = facts["entropy"], facts["entropy_of_one"]
    assert isinstance(rate, float)
    assert isinstance(of_one, float)
    assert facts["best_loss"] == pytest.approx(0.25 * of_one + 0.75 * rate)
    assert len(stored(tmp_path, "test")) == 2000


def test_the_majority_of_telling_symbols_is_right_for_exactly_nine_rows_in_ten() -> None:
    config = SYNTHETIC
    dataset = open_dataset(prepare(config), config)
    assert isinstance(dataset, LabelledRows)
    assert dataset.facts["best_accuracy"] == 0.9
    for split, rows in {"train": 2000, "val": 200, "test": 200}.items():
        batch = dataset.batch(split, 0, global_batch=rows, seed=1, epoch=0)
        symbols = batch.inputs.numpy()
        yes = ((symbols >= synthetic.YES) & (symbols < synthetic.NO)).sum(axis=1)
        no = ((symbols >= synthetic.NO) & (symbols < synthetic.PLAIN)).sum(axis=1)
        assert ((yes + no) % 2 == 1).all()
        assert ((yes > no) == batch.targets.numpy().astype(bool)).mean() == pytest.approx(0.9, abs=1e-12)
        assert (symbols[:, 0] == synthetic.CLS).all()
        assert 0.4 < (yes > no).mean() < 0.6
        assert batch.lengths.min() == synthetic.SHORTEST
        assert batch.lengths.max() == config.seq_len


def test_sources_too_small_to_judge_by_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardlabError, match="100 or more would"):
        synthetic.build(replace(SYNTHETIC, train_rows=99), {}, tmp_path)
    with pytest.raises(ShardlabError, match=r"seq_len=3 is too short.* 4 would"):
        synthetic.build(replace(SYNTHETIC, seq_len=3), {}, tmp_path)


# the numbers behind all of it


def test_draws_are_what_they_were_and_differ_by_key() -> None:
    assert raw(2, 1, 2).tolist() == [5527141919257688469, 1364028082176693913]
    assert permutation(6, 5, 0).tolist() == [3, 2, 4, 5, 0, 1]
    assert sorted(permutation(1000, 5, 1).tolist()) == list(range(1000))
    assert permutation(1000, 5, 1).tolist() != permutation(1000, 5, 2).tolist()
    draws = uniform(100_000, 3)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.005)
