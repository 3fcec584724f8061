"""Preparing a dataset as the launcher and `shardlab data` do."""

import shutil
import subprocess
import sys
from dataclasses import fields, replace
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.config.schema import CHOSEN, NsmcConfig, PydocConfig, SyntheticConfig, Task, TextConfig, Tokenizer, Tokens
from shardlab.data import describe as describing
from shardlab.data import prepare as preparing
from shardlab.data import sources
from shardlab.data.cache import cache_root, is_whole
from shardlab.data.corpora import corpus_of, nsmc
from shardlab.data.dataset import open_dataset
from shardlab.data.describe import describe
from shardlab.data.download import UnreachableError
from shardlab.data.prepare import prepare, seek
from shardlab.data.sources import SourceFile
from shardlab.errors import ShardlabError

PYDOC = PydocConfig("pydoc", 32)
SYNTHETIC = SyntheticConfig("synthetic", Task.language_model, seq_len=16, train_tokens=5000, train_rows=1000)


@pytest.fixture
def no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on this machine and no mirror to ask."""
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDLAB_DATA", raising=False)

    def refuse(file: SourceFile, target: Path, *, patience: float) -> None:
        raise UnreachableError("mirror.invalid: Name or service not known")

    monkeypatch.setattr(sources, "download", refuse)


@pytest.mark.parametrize("config", [PYDOC, SYNTHETIC])
def test_a_warm_start_imports_neither_torch_nor_numpy(config: PydocConfig | SyntheticConfig) -> None:
    folder = prepare(config)
    program = f"""
import sys
from shardlab.config.schema import PydocConfig, SyntheticConfig, Task
from shardlab.data.prepare import prepare
assert str(prepare({config!r}, global_batch=4)) == {str(folder)!r}
print([name for name in ("torch", "numpy", "torchtext", "tokenizers", "filelock") if name in sys.modules])
"""
    program = program.replace("<Task.language_model: 'language_model'>", "Task.language_model")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_only_what_changes_the_tokens_changes_the_folder() -> None:
    def folder(config: Any) -> Path:
        return seek(config).folder

    text = [TextConfig("wikitext2", None, tokens, seq_len) for tokens in Tokens for seq_len in (10, 20)]
    assert len({folder(config) for config in text}) == 2
    reviews = [
        NsmcConfig("nsmc", None, tokenizer, max_length, validation_rows)
        for tokenizer in Tokenizer
        for max_length in (16, 32)
        for validation_rows in (100, 200)
    ]
    assert len({folder(config) for config in reviews}) == 4
    assert folder(PYDOC) == folder(PydocConfig("pydoc", 64))
    changes = [{}, {"seq_len": 17}, {"train_tokens": 5001}, {"task": Task.classifier, "train_rows": 5000}]
    assert len({folder(replace(SYNTHETIC, **change)) for change in [*changes, {"train_rows": 2000}]}) == len(changes)


def test_other_published_files_change_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NsmcConfig("nsmc", None, Tokenizer.trained, 32, 10)
    monkeypatch.delenv("SHARDLAB_DATA", raising=False)
    before = seek(config).folder
    monkeypatch.setattr("shardlab.data.corpora.nsmc.TEST", replace(nsmc.TEST, sha256="0" * 64))
    assert seek(config).folder != before


def test_the_length_of_a_row_is_the_configs_though_the_folder_is_shared() -> None:
    for seq_len in (16, 32):
        config = PydocConfig("pydoc", seq_len)
        dataset = open_dataset(prepare(config), config)
        assert dataset.max_len == seq_len
        assert dataset.batch("train", 0, global_batch=3, seed=1, epoch=0).inputs.shape == (3, seq_len)


def test_a_batch_that_no_split_can_fill_is_refused_before_anything_starts() -> None:
    prepare(SYNTHETIC, global_batch=250)
    with pytest.raises(ShardlabError, match=r"global_batch=251 .* 500 val tokens .* at most 250 would"):
        prepare(SYNTHETIC, global_batch=251)


@pytest.mark.usefixtures("no_sources")
@pytest.mark.parametrize(
    ("config", "ways_out"),
    [
        (TextConfig("wikitext2", None, Tokens.words, 35), ["train.txt", "dataset.path", "dataset=pydoc"]),
        (NsmcConfig("nsmc", None, Tokenizer.trained, 32, 10), ["ratings_train.txt", "dataset.path"]),
    ],
)
def test_missing_data_is_one_error_that_says_what_to_do(config: TextConfig | NsmcConfig, ways_out: list[str]) -> None:
    with pytest.raises(ShardlabError) as raised:
        prepare(config)
    for part in [*ways_out, "was not found", "mirror.invalid", f"shardlab data {config.name}"]:
        assert part in str(raised.value)
    assert not list(cache_root().rglob("*.building-*"))


@pytest.mark.usefixtures("no_sources")
def test_a_missing_vocabulary_advises_a_trained_one() -> None:
    config = NsmcConfig("nsmc", None, Tokenizer.multilingual_bert, 32, 10)
    vocabulary = corpus_of("nsmc").files(config)[-1]
    with pytest.raises(ShardlabError, match=r"SHARDLAB_DATA.*dataset\.tokenizer=trained"):
        sources.fetch("nsmc", [vocabulary], {}, patience=1.0)


@pytest.mark.usefixtures("no_sources")
def test_prepared_tokens_serve_without_their_sources(tmp_path: Path) -> None:
    config = TextConfig("wikitext2", None, Tokens.words, 35)
    folder = seek(config).folder
    shutil.copytree(prepare(PYDOC), folder)
    assert prepare(config) == folder


def test_describe_tells_what_is_there_and_looking_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDLAB_DATA", raising=False)
    assert "not made yet" in describe(PYDOC, check=True)
    missing = describe(TextConfig("wikitext2", None, Tokens.words, 35), check=True)
    assert "train.txt: not here; 10.8 MB from https://" in missing
    assert not (tmp_path / "cache").exists()

    told = describe(PYDOC, check=False)
    assert is_whole(seek(PYDOC).folder)
    dataset = open_dataset(prepare(PYDOC), PYDOC)
    for part in ("language reference", f"{dataset.vocab_size:,}", dataset.fingerprint, "train_tokens="):
        assert part in told
    assert told == describe(PYDOC, check=True)
    assert describing.PATIENCE > preparing.PATIENCE


@pytest.mark.parametrize("name", sorted(CHOSEN["dataset"]))
def test_every_dataset_has_a_corpus_and_a_yaml_with_every_key(name: str) -> None:
    assert corpus_of(name).ABOUT
    written = yaml.safe_load((resources("shardlab.conf") / "dataset" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(written) == {field.name for field in fields(CHOSEN["dataset"][name])}
    assert written["name"] == name


def test_an_unknown_dataset_is_refused_by_name() -> None:
    with pytest.raises(ShardlabError, match="no dataset 'os'; there are nsmc, pydoc, synthetic, wikitext2"):
        corpus_of("os")
