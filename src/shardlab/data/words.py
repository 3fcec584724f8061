"""Language-model corpora of words: from lists of tokens to the arrays and vocabulary of a prepared folder.

torchtext makes the tokens and the vocabulary (by frequency, equals in alphabetical order, `<unk>` first); the
vocabulary knows the words of the training split alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from torchtext.data.utils import get_tokenizer
from torchtext.vocab import Vocab

from shardlab.config.schema import Task
from shardlab.data.prepared import SPLITS, Meta, write_tokens, write_vocabulary

UNKNOWN = "<unk>"
EOS = "<eos>"


def basic_english(lines: Iterable[str]) -> list[str]:
    """torchtext's `basic_english` tokens of each line, one after the other; lines without any vanish."""
    tokenize = get_tokenizer("basic_english")
    return [token for line in lines for token in tokenize(line)]


def plain_words(lines: Iterable[str]) -> list[str]:
    """The words between spaces, and `<eos>` after every line, empty ones too."""
    return [word for line in lines for word in (*line.split(), EOS)]


def write_corpus(name: str, tokens: Mapping[str, list[str]], folder: Path) -> Meta:
    """Number the tokens of every split by the training split's vocabulary and write them."""
    # torchtext's default would add <pad>, and its stoi grows by every unknown word that it is asked for
    words: list[str] = Vocab(Counter(tokens["train"]), specials=(UNKNOWN,)).itos
    number = {word: i for i, word in enumerate(words)}
    unknown = number[UNKNOWN]
    facts: dict[str, int | float | str] = {"vocabulary": len(words)}
    for split in SPLITS:
        ids = np.fromiter((number.get(token, unknown) for token in tokens[split]), np.int32, len(tokens[split]))
        write_tokens(folder, split, ids)
        facts[f"{split}_tokens"] = len(ids)
        facts[f"{split}_unknown"] = int(np.count_nonzero(ids == unknown))
    write_vocabulary(folder, words)
    return Meta(
        name=name,
        task=Task.language_model,
        vocab_size=len(words),
        n_classes=0,
        counts={split: len(tokens[split]) for split in SPLITS},
        facts=facts,
    )
