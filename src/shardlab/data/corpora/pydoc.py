"""The English language reference inside every CPython: a small real text that needs no download.

`pydoc_data.topics` says much of it twice: a topic often contains others whole. Topics that share a line of some
length therefore go to the same split, or the model would be tested on lines that it has learned by heart.
The text varies with the version of Python, so its checksum is part of the key.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from shardlab.config.schema import PydocConfig
from shardlab.data.prepared import SPLITS, Meta
from shardlab.data.sources import SourceFile

ABOUT = "Python's language reference as `pydoc` carries it (pydoc_data.topics); PSF licence"
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
"""The splits' shares of the tokens, met as closely as whole groups of topics allow."""

TELLING = 40
"""Characters from which on a line that stands in two topics is taken for the same text, not for chance."""


def topics() -> dict[str, str]:
    """Name -> text of every topic, in alphabetical order."""
    from pydoc_data import topics as module

    return dict(sorted(module.topics.items()))


def files(config: PydocConfig) -> tuple[SourceFile, ...]:
    """None: the text is a Python module."""
    return ()


def key(config: PydocConfig) -> dict[str, str | int]:
    """The text itself; seq_len only cuts the tokens when they are read."""
    text = hashlib.sha256(repr(list(topics().items())).encode())
    return {"text": text.hexdigest()}


def check(path: Path) -> None:
    """No files, so nothing to check."""


def build(config: PydocConfig, files: Mapping[str, Path], folder: Path) -> Meta:
    """Line by line into tokens, topic after topic."""
    from shardlab.data import words

    texts = topics()
    tokens = {name: words.basic_english(text.split("\n")) for name, text in texts.items()}
    place = assign(texts, {name: len(of_topic) for name, of_topic in tokens.items()})
    splits = {split: [token for name in texts if place[name] == split for token in tokens[name]] for split in SPLITS}
    return words.write_corpus("pydoc", splits, folder)


def assign(texts: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, str]:
    """The split of every topic: groups that share text, the largest first, each to the split that lacks most."""
    lacking = {split: share * sum(sizes.values()) for split, share in SHARES.items()}
    groups = sorted(sharing_groups(texts), key=lambda group: (-sum(sizes[name] for name in group), group))
    place = {}
    for group in groups:
        split = max(SPLITS, key=lambda candidate: lacking[candidate])
        place.update(dict.fromkeys(group, split))
        lacking[split] -= sum(sizes[name] for name in group)
    return place


def sharing_groups(texts: Mapping[str, str]) -> list[list[str]]:
    """Topics in groups such that no line of TELLING characters stands in two groups."""
    topics_of_line = defaultdict(set)
    for name, text in texts.items():
        for line in map(str.strip, text.split("\n")):
            if len(line) >= TELLING:
                topics_of_line[line].add(name)
    group_of = {name: {name} for name in texts}
    for sharing in topics_of_line.values():
        merged = set[str]().union(*(group_of[name] for name in sharing))
        for name in merged:
            group_of[name] = merged
    return [sorted(group) for name, group in group_of.items() if name == min(group)]
