"""One module a corpus, found by the name of its dataset.

A corpus says which files it reads, what else its tokens depend on, and how to write them into a folder; where files
come from, checksums, locks and the cache are not its business. The names are those of `schema.CHOSEN`, so a config
can choose a module of this folder and nothing else.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from shardlab.config.schema import CHOSEN, NsmcConfig, PydocConfig, SyntheticConfig, TextConfig
from shardlab.data.prepared import Meta
from shardlab.data.sources import SourceFile
from shardlab.errors import ShardlabError

DatasetConfig = TextConfig | PydocConfig | NsmcConfig | SyntheticConfig
"""What a dataset's YAML fills; `schema.CHOSEN` maps its name to one of these."""


class Corpus(Protocol):
    """What a module of this folder holds. It imports numpy, torchtext or tokenizers inside `build` only.

    The launcher asks `files` and `key` at every start, when the tokens are long made.
    """

    ABOUT: str
    """One line for `shardlab data NAME`: what the text is and where it comes from."""

    def files(self, config: Any) -> tuple[SourceFile, ...]:
        """The files that are read, with their checksums; none if the corpus is made here."""

    def key(self, config: Any) -> dict[str, str | int]:
        """Everything but the files and this code that the tokens depend on: some fields of the config."""

    def check(self, path: Path) -> None:
        """Read one source file; ShardlabError with name, line and reason if its format is wrong."""

    def build(self, config: Any, files: Mapping[str, Path], folder: Path) -> Meta:
        """Read the files (name -> path) and write the tokens of every split into the folder."""


def corpus_of(name: str) -> Corpus:
    """The module of a dataset; ShardlabError for a name that is none."""
    if name not in CHOSEN["dataset"]:
        raise ShardlabError(f"there is no dataset {name!r}; there are {', '.join(sorted(CHOSEN['dataset']))}")
    return cast(Corpus, import_module(f"{__name__}.{name}"))


def row_length(config: DatasetConfig) -> int:
    """The longest row that a config allows, in tokens: its seq_len or max_length."""
    length: int = config.max_length if hasattr(config, "max_length") else config.seq_len
    return length
