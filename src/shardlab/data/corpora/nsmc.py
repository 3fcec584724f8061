"""NSMC, the Naver sentiment movie corpus: 200,000 Korean film reviews, each liked (1) or not (0).

Validation is a fixed part of the training file, drawn by a seed of its own, so that no setting of a run moves a row
from one to the other, and the test file is looked at once per published figure. A row is kept uncut; `max_length`
cuts it when it is read, with [SEP] kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardlab.config.schema import NsmcConfig, Task, Tokenizer
from shardlab.data.prepared import Meta
from shardlab.data.sources import SourceFile, decoded_lines
from shardlab.errors import ShardlabError

ABOUT = "NSMC, Korean film reviews liked or not (github.com/e9t/nsmc); CC0"
VALIDATION_SEED = 20240229
HEADER = ("id", "document", "label")
MIRRORS = (
    "https://raw.githubusercontent.com/e9t/nsmc/master",
    "https://github.com/e9t/nsmc/raw/master",
    "https://cdn.jsdelivr.net/gh/e9t/nsmc@master",
)


def _file(name: str, size: int, sha256: str) -> SourceFile:
    return SourceFile(name, "nsmc", size, sha256, tuple(f"{mirror}/{name}" for mirror in MIRRORS))


TRAIN = _file("ratings_train.txt", 14628807, "e03b7d14e9e41be8d464a28057cd25d7396c53e67aa7fd5f7e552c59b0ee2940")
TEST = _file("ratings_test.txt", 4893335, "8ac9f64052f11dbf6ae0acb5e038f03d90a76f0eda7820cfb3a92d02edfcebda")
VOCABULARY = SourceFile(
    "vocab.txt",
    "bert-base-multilingual-cased",
    995526,
    "fe0fda7c425b48c516fc8f160d594c8022a0808447475c1a7c6d6479763f310c",
    (
        "https://huggingface.co/google-bert/bert-base-multilingual-cased/resolve/main/vocab.txt",
        "https://s3.amazonaws.com/models.huggingface.co/bert/bert-base-multilingual-cased-vocab.txt",
    ),
    in_path=False,
    instead="set dataset.tokenizer=trained, which makes a vocabulary from the training text",
)


@dataclass(frozen=True)
class Ratings:
    """The rows of a file: documents, some of them empty, and labels, 0 or 1."""

    documents: list[str]
    labels: list[int]


def files(config: NsmcConfig) -> tuple[SourceFile, ...]:
    """The ratings, and multilingual BERT's vocabulary if it is asked for."""
    return (TRAIN, TEST, VOCABULARY) if config.tokenizer is Tokenizer.multilingual_bert else (TRAIN, TEST)


def key(config: NsmcConfig) -> dict[str, str | int]:
    """The tokenizer and the cut between training and validation."""
    return {"tokenizer": config.tokenizer.name, "validation_rows": config.validation_rows}


def check(path: Path) -> None:
    """Ratings must parse; a vocabulary is one piece a line."""
    if path.name == VOCABULARY.name:
        decoded_lines("nsmc", path)
    else:
        read_ratings(path)


def read_ratings(path: Path) -> Ratings:
    """Read a ratings file: a header, then `id TAB document TAB label`; quotes are characters like any other."""
    header, *lines = decoded_lines("nsmc", path)
    if tuple(header.rstrip("\r").split("\t")) != HEADER:
        raise _wrong(path, 1, f"header is {header[:80]!r}, expected {' TAB '.join(HEADER)}")
    documents, labels = [], []
    for number, line in enumerate(lines, start=2):
        columns = line.rstrip("\r").split("\t")
        if len(columns) != len(HEADER):
            raise _wrong(path, number, f"{len(columns)} columns between tabs, expected {len(HEADER)}")
        if columns[2] not in ("0", "1"):
            raise _wrong(path, number, f"label is {columns[2][:80]!r}, expected 0 or 1")
        documents.append(columns[1])
        labels.append(int(columns[2]))
    if not documents:
        raise _wrong(path, 1, "no rows after the header")
    return Ratings(documents, labels)


def build(config: NsmcConfig, files: Mapping[str, Path], folder: Path) -> Meta:
    """Word pieces of every document, rows end to end."""
    from shardlab.data.prepared import write_rows, write_vocabulary
    from shardlab.data.wordpiece import WordPieces

    splits = split_ratings(read_ratings(files[TRAIN.name]), read_ratings(files[TEST.name]), config.validation_rows)
    if config.tokenizer is Tokenizer.multilingual_bert:
        pieces = WordPieces.read(files[VOCABULARY.name])
    else:
        pieces = WordPieces.train(splits["train"].documents)
    seen = set(splits["train"].documents)
    facts: dict[str, int | float | str] = {"vocabulary": len(pieces.words)}
    for split, ratings in splits.items():
        rows = pieces.encode(ratings.documents)
        write_rows(folder, split, rows, ratings.labels)
        facts[f"{split}_rows"] = len(rows)
        facts[f"{split}_tokens"] = sum(map(len, rows))
        facts[f"{split}_unknown"] = sum(row.count(pieces.unknown_id) for row in rows)
        facts[f"{split}_empty_documents"] = ratings.documents.count("")
        facts[f"{split}_longest_row"] = max(map(len, rows))
        facts[f"{split}_liked"] = sum(ratings.labels)
        if split != "train":
            facts[f"{split}_documents_in_train"] = sum(document in seen for document in ratings.documents)
    write_vocabulary(folder, pieces.words)
    return Meta(
        name="nsmc",
        task=Task.classifier,
        vocab_size=len(pieces.words),
        n_classes=2,
        counts={split: len(ratings.labels) for split, ratings in splits.items()},
        pad_id=pieces.pad_id,
        sep_id=pieces.sep_id,
        facts=facts,
    )


def split_ratings(train: Ratings, test: Ratings, validation_rows: int) -> dict[str, Ratings]:
    """Take the validation rows out of the training file; both keep the file's order."""
    from shardlab.data.permutation import permutation

    rows = len(train.labels)
    if not 0 < validation_rows < rows:
        raise ShardlabError(
            f"dataset.validation_rows={validation_rows} can't be taken from the {rows} rows of {TRAIN.name}; "
            f"1 to {rows - 1} would leave some to train on"
        )
    held_out = set(permutation(rows, VALIDATION_SEED)[:validation_rows].tolist())

    def part(chosen: list[int]) -> Ratings:
        return Ratings([train.documents[i] for i in chosen], [train.labels[i] for i in chosen])

    return {
        "train": part([i for i in range(rows) if i not in held_out]),
        "val": part(sorted(held_out)),
        "test": test,
    }


def _wrong(path: Path, line: int, reason: str) -> ShardlabError:
    return ShardlabError(f"dataset nsmc: {path.name} line {line}: {reason}")
