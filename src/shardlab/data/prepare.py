"""From a dataset's config to the folder with its tokens.

The launcher calls this before it starts anything, so that wrong or missing data is one line at once. When the
tokens are there, it costs the checksums of the sources that are there too, and imports neither torch nor numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardlab.data.cache import build_once, is_whole, prepared_folder
from shardlab.data.corpora import Corpus, DatasetConfig, corpus_of, row_length
from shardlab.data.prepared import Meta, read_meta, steps_in_pass
from shardlab.data.sources import SourceFile, fetch, find, verify

PATIENCE = 1.5
"""Seconds that a mirror has to answer while a run waits to start; `shardlab data` waits longer."""


@dataclass(frozen=True)
class Sought:
    """What is on this machine of a dataset.

    found: source files by name, all of them verified; folder: the prepared one, whether or not it is there
    """

    corpus: Corpus
    files: tuple[SourceFile, ...]
    found: Mapping[str, Path]
    folder: Path


def seek(config: DatasetConfig) -> Sought:
    """Look for a dataset's files and verify those that are there; downloads and writes nothing."""
    corpus = corpus_of(config.name)
    files = corpus.files(config)
    found = find(config.name, files, getattr(config, "path", None))
    for file in files:
        if file.name in found:
            verify(config.name, file, found[file.name], corpus.check)
    key = {"corpus": corpus.key(config), "files": {file.name: file.sha256 for file in files}}
    return Sought(corpus, files, found, prepared_folder(config.name, key))


def prepare(config: DatasetConfig, *, global_batch: int | None = None, patience: float = PATIENCE) -> Path:
    """The folder with a dataset's tokens; they are made, once, if they are not there.

    global_batch: if given, ShardlabError where a split can't fill a single step of it
    """
    sought = seek(config)
    if not is_whole(sought.folder):

        def build(folder: Path) -> Meta:
            paths = fetch(config.name, sought.files, sought.found, patience=patience)
            return sought.corpus.build(config, paths, folder)

        build_once(sought.folder, build)
    if global_batch is not None:
        meta = read_meta(sought.folder)
        for split in meta.counts:
            steps_in_pass(meta, split, global_batch=global_batch, max_len=row_length(config))
    return sought.folder
