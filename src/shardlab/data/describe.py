"""`shardlab data NAME [--check]`: fetch and prepare a dataset ahead of time, or explain what is there.

`--check` downloads and writes nothing; it reads every source that is on this machine and says what is missing.
"""

from pathlib import Path

from shardlab.data.cache import is_whole
from shardlab.data.corpora import DatasetConfig
from shardlab.data.prepare import Sought, prepare, seek
from shardlab.data.prepared import read_meta
from shardlab.data.sources import SourceFile

PATIENCE = 20.0
"""Seconds that a mirror has to answer when the user asked for nothing but the data."""


def describe(config: DatasetConfig, *, check: bool) -> str:
    """What a dataset is, where its files are and what came out of them, as text to print.

    check: only look. ShardlabError if a file is wrong, or, unless only looking, can't be had
    """
    if not check:
        prepare(config, patience=PATIENCE)
    sought = seek(config)
    lines = [f"{config.name}: {sought.corpus.ABOUT}"]
    lines += [_source_line(file, sought.found.get(file.name)) for file in sought.files]
    return "\n".join(lines + _prepared_lines(sought))


def _source_line(file: SourceFile, path: Path | None) -> str:
    size = f"{file.size / 1e6:.1f} MB"
    if path is None:
        return f"  {file.name}: not here; {size} from {file.mirrors[0]}"
    return f"  {file.name}: {path} ({size}, sha256 {file.sha256[:8]}… as published)"


def _prepared_lines(sought: Sought) -> list[str]:
    if not is_whole(sought.folder):
        return ["  tokens: not made yet; the first run makes them"]
    meta = read_meta(sought.folder)
    unit = "rows" if meta.n_classes else "tokens"
    counts = ", ".join(f"{count:,} {split}" for split, count in meta.counts.items())
    facts = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in meta.facts.items()
    )
    return [
        f"  {unit}: {counts}",
        f"  vocabulary: {meta.vocab_size:,} entries",
        f"  facts: {facts}",
        f"  fingerprint: {meta.fingerprint}",
        f"  prepared: {sought.folder}",
    ]
