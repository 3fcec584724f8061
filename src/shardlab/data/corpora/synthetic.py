"""Sources whose best possible result is known, so that "it learns" is a number.

Language model: a Markov chain in which the next symbol depends on the last two. Its entropy rate, in nats, is exact,
and so is the loss of the best model that sees a row of seq_len symbols and nothing before it. A model that can't
look back gets no further than `entropy_of_one`.
Classifier: a row says yes or no with an odd number of telling symbols among others; the majority is its true label,
and exactly one label in ten is turned round, in every split. So the best accuracy is 0.9, without noise.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.config.schema import SyntheticConfig, Task
from shardlab.data.prepared import SPLITS, Meta
from shardlab.data.sources import SourceFile
from shardlab.errors import ShardlabError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ABOUT = "generated here: a Markov chain of known entropy, or rows of which a known share is labelled right"
SEED = 1
HELD_OUT = 0.1
"""Size of the validation and of the test split, as a share of the training split."""

SYMBOLS = 8
"""The chain's alphabet."""

WEIGHT_OF_OLDER, WEIGHT_OF_LAST = 5.0, 4.0
"""How much the last symbol but one, and the last one, have to say about the next."""

PAD, CLS, YES, NO, PLAIN, CLASSIFIER_SYMBOLS = 0, 1, 2, 6, 10, 20
"""The classifier's alphabet: four symbols that say yes, from YES on, four that say no, ten that say nothing."""

SHORTEST = 4
"""Fewest symbols of a classifier's row, CLS included; the longest has seq_len."""

MOST_TELLING = 5
"""Most telling symbols of a row; their number is odd."""

TURNED = 10
"""One label in so many is turned round."""


def files(config: SyntheticConfig) -> tuple[SourceFile, ...]:
    """None: it is generated."""
    return ()


def key(config: SyntheticConfig) -> dict[str, str | int]:
    """All of the config: sizes, and the row length that the best loss depends on."""
    size = config.train_tokens if config.task is Task.language_model else config.train_rows
    return {"task": config.task.name, "size": size, "seq_len": config.seq_len}


def check(path: Path) -> None:
    """No files, so nothing to check."""


def build(config: SyntheticConfig, files: Mapping[str, Path], folder: Path) -> Meta:
    """Generate the splits of the task that the config names."""
    if config.task is Task.language_model:
        return _build_chain(config, folder)
    return _build_rows(config, folder)


def _sizes(train: int) -> dict[str, int]:
    held_out = int(train * HELD_OUT)
    return {"train": train, "val": held_out, "test": held_out}


def _build_chain(config: SyntheticConfig, folder: Path) -> Meta:
    from shardlab.data.prepared import write_tokens

    table = transitions()
    rate, of_one = entropies(table)
    sizes = _sizes(config.train_tokens)
    for stream, (split, size) in enumerate(sizes.items()):
        write_tokens(folder, split, walk(table, size, stream))
    return Meta(
        name="synthetic",
        task=Task.language_model,
        vocab_size=SYMBOLS,
        n_classes=0,
        counts=sizes,
        facts={
            "entropy": rate,
            "best_loss": (of_one + (config.seq_len - 1) * rate) / config.seq_len,
            "entropy_of_one": of_one,
        },
    )


def transitions() -> "Floats":
    """The law of the chain: [last but one, last, next], each row summing to 1.

    Both symbols weigh in by a table of their own; the one further back weighs more.
    """
    import numpy as np

    from shardlab.data.permutation import uniform

    draws = uniform(2 * SYMBOLS * SYMBOLS, SEED).reshape(2, SYMBOLS, SYMBOLS)
    scores = WEIGHT_OF_OLDER * draws[0][:, None, :] + WEIGHT_OF_LAST * draws[1][None, :, :]
    weights = np.exp(scores)
    law: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return law


def entropies(law: "Floats") -> tuple[float, float]:
    """Entropy of the next symbol in nats, given the last two (the chain's rate) and given the last one.

    Both follow from how often each pair stands in the chain in the long run: the left eigenvector, for eigenvalue 1,
    of the chain that walks over pairs.
    """
    import numpy as np

    n = law.shape[0]
    pairs = np.zeros((n, n, n, n))
    for last in range(n):
        pairs[:, last, last, :] = law[:, last, :]
    # pi (P - 1) = 0 with sum(pi) = 1, as one full-rank linear system
    system = pairs.reshape(n * n, n * n).T - np.eye(n * n)
    system[-1] = 1.0
    often = np.linalg.solve(system, np.eye(n * n)[-1]).reshape(n, n)
    rate = -np.einsum("ab,abc,abc->", often, law, np.log(law))
    joint = np.einsum("ab,abc->bc", often, law)
    of_one = -np.sum(joint * np.log(joint / joint.sum(axis=1, keepdims=True)))
    return float(rate), float(of_one)


def walk(law: "Floats", size: int, stream: int) -> "NDArray[np.int32]":
    """The first `size` symbols of the chain; every stream number is an independent walk."""
    from bisect import bisect_right

    import numpy as np

    from shardlab.data.permutation import uniform

    bounds = [[row[:-1].cumsum().tolist() for row in rows] for rows in law]
    symbols = [0, 0]
    for draw in uniform(size, SEED, 1 + stream).tolist():
        symbols.append(bisect_right(bounds[symbols[-2]][symbols[-1]], draw))
    return np.asarray(symbols[2:], np.int32)


def _build_rows(config: SyntheticConfig, folder: Path) -> Meta:
    from shardlab.data.prepared import write_rows

    if config.seq_len < SHORTEST:
        raise ShardlabError(f"dataset.seq_len={config.seq_len} is too short for synthetic rows; {SHORTEST} would do")
    sizes = {split: rows // TURNED * TURNED for split, rows in _sizes(config.train_rows).items()}
    if min(sizes.values()) == 0:
        least = int(TURNED / HELD_OUT)
        raise ShardlabError(f"dataset.train_rows={config.train_rows} leaves no test rows; {least} or more would")
    for stream, split in enumerate(SPLITS):
        rows, truth = labelled_rows(sizes[split], config.seq_len, stream)
        write_rows(folder, split, rows, turn_some(truth, stream))
    return Meta(
        name="synthetic",
        task=Task.classifier,
        vocab_size=CLASSIFIER_SYMBOLS,
        n_classes=2,
        counts=sizes,
        pad_id=PAD,
        facts={"best_accuracy": 1 - 1 / TURNED},
    )


def labelled_rows(rows: int, seq_len: int, stream: int) -> tuple[list[list[int]], list[int]]:
    """Rows of SHORTEST to seq_len symbols, and what the majority of their telling symbols says.

    A row's readiness to say yes is drawn first, so that narrow and wide majorities are about as frequent.
    """
    import numpy as np

    from shardlab.data.permutation import uniform

    def draw(what: int, *shape: int) -> "Floats":
        return uniform(int(np.prod(shape)), SEED, 100 + stream, what).reshape(shape)

    body = SHORTEST - 1 + (draw(0, rows) * (seq_len - SHORTEST + 1)).astype(int)
    telling = 1 + 2 * (draw(1, rows) * ((np.minimum(body, MOST_TELLING) + 1) // 2)).astype(int)
    # the first `telling` places in a random order of a row's own places
    places = np.where(np.arange(seq_len - 1) < body[:, None], draw(2, rows, seq_len - 1), 2.0)
    tells = places.argsort(axis=1).argsort(axis=1) < telling[:, None]
    says_yes = tells & (draw(3, rows, seq_len - 1) < draw(4, rows, 1))
    which = draw(5, rows, seq_len - 1)
    symbols = np.where(tells, np.where(says_yes, YES, NO) + which * 4, PLAIN + which * 10).astype(int)
    truth = 2 * says_yes.sum(axis=1) > telling
    return [[CLS, *row[:n]] for row, n in zip(symbols.tolist(), body.tolist(), strict=True)], truth.astype(int).tolist()


def turn_some(truth: list[int], stream: int) -> list[int]:
    """The labels with exactly one in TURNED turned round."""
    from shardlab.data.permutation import permutation

    labels = list(truth)
    for row in permutation(len(labels), SEED, 200 + stream)[: len(labels) // TURNED].tolist():
        labels[row] = 1 - labels[row]
    return labels
