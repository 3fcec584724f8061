"""WikiText-2 (Merity et al. 2016): two million words of good English Wikipedia articles.

`tokens=basic_english` is what the classic nn.Transformer tutorials train on: 28,782 vocabulary entries and 2,049,990
training tokens. `tokens=words` takes the corpus's own words, as published perplexities do: 33,278 types.
"""

from collections.abc import Mapping
from pathlib import Path

from shardlab.config.schema import TextConfig, Tokens
from shardlab.data.prepared import Meta
from shardlab.data.sources import SourceFile, decoded_lines

ABOUT = "WikiText-2, English Wikipedia articles with rare words as <unk> (Merity et al. 2016); CC BY-SA"
MIRRORS = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2",
    "https://cdn.jsdelivr.net/gh/pytorch/examples@main/word_language_model/data/wikitext-2",
    "https://github.com/pytorch/examples/raw/main/word_language_model/data/wikitext-2",
)
INSTEAD = "take dataset=pydoc, which needs no download"


def _file(name: str, size: int, sha256: str) -> SourceFile:
    mirrors = tuple(f"{mirror}/{name}" for mirror in MIRRORS)
    return SourceFile(name, "wikitext-2", size, sha256, mirrors, instead=INSTEAD)


FILES = {
    "train": _file("train.txt", 10797148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
    "val": _file("valid.txt", 1121681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    "test": _file("test.txt", 1256449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
}


def files(config: TextConfig) -> tuple[SourceFile, ...]:
    """train.txt, valid.txt and test.txt."""
    return tuple(FILES.values())


def key(config: TextConfig) -> dict[str, str | int]:
    """The kind of tokens; seq_len only cuts them when they are read."""
    return {"tokens": config.tokens.name}


def check(path: Path) -> None:
    """Any UTF-8 text is well formed."""
    decoded_lines("wikitext2", path)


def build(config: TextConfig, files: Mapping[str, Path], folder: Path) -> Meta:
    """Line by line into tokens, one stream a split."""
    from shardlab.data import words

    tokenize = words.basic_english if config.tokens is Tokens.basic_english else words.plain_words
    tokens = {split: tokenize(decoded_lines("wikitext2", files[file.name])) for split, file in FILES.items()}
    return words.write_corpus("wikitext2", tokens, folder)
