"""The prepared folder: what lies in it, and what follows from its counts alone.

One flat int32 array of token ids a split, memory-mapped by every rank; a classifier has the start of each row and
its label beside it. `meta.json` is written last and says everything else, so that the launcher can check a config
against the data without importing torch or numpy.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.config.schema import Task
from shardlab.errors import ShardlabError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPLITS = ("train", "val", "test")
META = "meta.json"
VOCABULARY = "vocabulary.txt"


@dataclass(frozen=True)
class Meta:
    """What a prepared folder holds.

    counts: of each split, the tokens (language model) or the rows (classifier)
    pad_id, sep_id: of a classifier: fills short rows; ends rows that are cut. None: nothing of the kind
    facts: numbers worth logging with a run, such as unknown words, empty documents, the entropy of a source
    fingerprint: sha256 of the arrays and the vocabulary, first 16 digits; files: their sizes in bytes. Set when
        the folder is finished (cache.py)
    """

    name: str
    task: Task
    vocab_size: int
    n_classes: int
    counts: dict[str, int]
    pad_id: int | None = None
    sep_id: int | None = None
    facts: dict[str, int | float | str] = field(default_factory=dict)
    fingerprint: str = ""
    files: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write meta.json into the folder."""
        text = json.dumps(asdict(self) | {"task": self.task.name}, indent=2, ensure_ascii=False)
        (folder / META).write_text(text + "\n", encoding="utf-8")


def read_meta(folder: Path) -> Meta:
    """The meta.json of a prepared folder."""
    values: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    return Meta(**values | {"task": Task[values["task"]]})


def write_tokens(folder: Path, split: str, ids: "NDArray[np.integer[Any]]") -> None:
    """Write a split's token ids as `SPLIT.npy`, int32 [tokens]."""
    import numpy as np

    np.save(folder / f"{split}.npy", ids.astype(np.int32, copy=False), allow_pickle=False)


def write_rows(folder: Path, split: str, rows: Sequence[Sequence[int]], labels: Iterable[int]) -> None:
    """Write a split's rows end to end as `SPLIT.npy`, their starts and the end as `SPLIT_starts.npy`, and labels."""
    import numpy as np

    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    write_tokens(folder, split, np.fromiter((piece for row in rows for piece in row), np.int32, int(starts[-1])))
    np.save(folder / f"{split}_starts.npy", starts, allow_pickle=False)
    np.save(folder / f"{split}_labels.npy", np.asarray(list(labels), np.int64), allow_pickle=False)


def write_vocabulary(folder: Path, words: Iterable[str]) -> None:
    """Write the vocabulary, one word a line; the line number, from 0, is the id."""
    (folder / VOCABULARY).write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")


def column_length(tokens: int, global_batch: int) -> int:
    """Tokens in each of the `global_batch` columns that a language model's stream is cut into."""
    return tokens // global_batch


def steps_in_pass(meta: Meta, split: str, *, global_batch: int, max_len: int) -> int:
    """Global batches in one pass over a split; the last may be short. ShardlabError if there is none.

    A language model's columns give one target less than tokens: the first is never predicted.
    """
    if split not in meta.counts:
        raise ShardlabError(f"dataset {meta.name} has no split {split!r}; it has {', '.join(meta.counts)}")
    count = meta.counts[split]
    if meta.task is Task.classifier:
        steps = -(-count // global_batch)
        if steps == 0:
            raise ShardlabError(f"dataset {meta.name} has no {split} rows")
        return steps
    steps = -(-(column_length(count, global_batch) - 1) // max_len)
    if steps < 1:
        raise ShardlabError(
            f"trainer.global_batch={global_batch} leaves no two tokens a row in the {count} {split} tokens of dataset "
            f"{meta.name}; at most {count // 2} would"
        )
    return steps
