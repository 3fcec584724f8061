"""The command around training: help, flags anywhere, the user's own choices, completion; nothing heavy is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.config.overrides import packaged_choices
from shardlab.launch.application import new_folders, remove_empty

LIGHT = [
    # what is asked                                     what the answer holds
    (["--help"],                                        "shardlab train [key=value ...]"),
    (["--version"],                                     "shardlab 0."),
    (["train", "--version"],                            "shardlab 0."),
    (["train", "--help"],                               "model: base, small, tiny, tutorial"),
    (["train", "-h", "model=small"],                    "n_layers: 8"),
    (["train", "--cfg", "job"],                         "name: tiny"),
    (["train", "model=small", "--cfg", "job", "seed=7"], "seed: 7"),
    (["train", "--cfg", "job", "--resolve", "strategy=ddp", "ranks=3"], "replicate: 3"),
    (["train", "-p", "model", "model=base", "-c", "job"], "d_model: 768"),
    (["train", "--cfg=job", "optimizer.kwargs.momentum=0.9"], "momentum: 0.9"),
    (["train", "-sc", "install=bash"],                  "complete -o nospace"),
    (["data", "--help"],                                "NAME"),
    (["parity", "--help"],                              "KEY=VALUE"),
    (["plan", "--help"],                                "--shapes"),
    (["compare", "--help"],                             "RUN"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "holds"), LIGHT)
def test_answers_with_flags_anywhere(words, holds, capfd):
    try:
        status = main(words)
    except SystemExit as end:  # argparse's own --help
        status = end.code
    assert status == 0
    assert holds in capfd.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["train", "--cfg", "job"], ["train", "optimizer.nam=x"], ["train", "ranks=0"]],
)
def test_answers_without_torch_and_mlflow(words):
    program = (
        "import sys; from shardlab.cli import main; status = main(sys.argv[1:]); "
        "print([name for name in ('torch', 'mlflow', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr.splitlines()[-1] == "[]"


def test_hydras_own_flags_work(shardlab):
    assert "pkg://shardlab.conf" in shardlab("train", "--info", "searchpath").stdout


def test_help_survives_a_reader_that_stops():
    command = f"{sys.executable} -m shardlab train --help | head -1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""


@pytest.fixture
def own_choices() -> Path:
    """A user's folder with a model size and an experiment."""
    for name, text in {
        "mine/model/mine.yaml": (
            "name: mine\nn_layers: 1\nd_model: 8\nn_heads: 2\nd_ff: 16\ndropout: 0.0\n"
            "norm: pre\nactivation: gelu\npositions: learned\ntie: false\n"
        ),
        "mine/experiment/short.yaml": (
            "# @package _global_\ndefaults:\n  - override /model: mine\ntrainer:\n  steps: 7\n"
        ),
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return Path("mine")


def test_config_dir_adds_choices(own_choices, capfd):
    assert main(["train", "--config-dir", str(own_choices), "experiment=short", "--cfg", "job"]) == 0
    shown = capfd.readouterr().out
    assert "name: mine" in shown
    assert "steps: 7" in shown
    assert main(["train", f"hydra.searchpath=[file://{own_choices.resolve()}]", "model=mine", "-c", "job"]) == 0


def test_a_users_primary_config_may_stand_on_the_packaged_one(own_choices, capfd):
    (own_choices / "all.yaml").write_text("defaults:\n  - config\n  - override model: mine\n  - _self_\nseed: 5\n")
    assert main(["train", "-cd", str(own_choices), "-cn", "all", "--cfg", "job"]) == 0
    shown = capfd.readouterr().out
    assert "name: mine" in shown
    assert "seed: 5" in shown


STRATEGIES = {f"strategy={name}" for name in packaged_choices("strategy")}
TABS = [
    # typed so far                               offered
    ("shardlab ",                                {"train", "plan", "data", "parity", "compare", "sync"}),
    ("shardlab plan -m strategy=z",              {"strategy=zero1", "strategy=zero2", "strategy=zero3"}),
    ("shardlab plan --s",                        {"--shapes"}),
    ("shardlab tr",                              {"train"}),
    ("shardlab train model=t",                   {"model=tiny", "model=tutorial"}),
    ("shardlab train model=small trainer.st",    {"trainer.steps="}),
    ("shardlab train -m model=small strategy=",  STRATEGIES),
    ("shardlab train --cfg ",                    {"job", "hydra", "all"}),
    ("shardlab train --cfg job preci",           {"precision=", "precision."}),
    ("shardlab train --config-dir mine model=m", {"model=mine"}),
    ("shardlab train --co",                      {"--config-dir", "--config-name"}),
    ("shardlab data w",                          {"wikitext2"}),
    ("shardlab data pydoc --c",                  {"--check", "--config-dir"}),
    ("shardlab parity strategy=zero",            {"strategy=zero1", "strategy=zero2", "strategy=zero3"}),
    ("shardlab parity --",                       {"--config-dir"}),
    ("shardlab train broken=[ mod",              set()),
]  # fmt: skip

TAB = """
eval "$(shardlab train -sc install=bash)"
while IFS= read -r line; do
    COMP_LINE="$line" COMP_POINT=${#line} COMP_WORDS=($line)
    case "$line" in *" ") COMP_WORDS+=("") ;; esac
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )) COMPREPLY=()
    hydra_bash_completion
    echo "${COMPREPLY[*]}"
done
"""


def test_tab_completes_after_the_subcommand(own_choices, monkeypatch, tmp_path):
    """Driven as bash does: the installed function is called with COMP_LINE and its like set."""
    command = tmp_path / "bin" / "shardlab"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardlab "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    typed = "".join(f"{line}\n" for line, _ in TABS)
    ended = subprocess.run(["bash", "-c", TAB], input=typed, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == ""
    assert [set(line.split()) for line in ended.stdout.splitlines()] == [offered for _, offered in TABS]


def test_only_new_and_empty_folders_are_removed():
    """Once it removed the user's current folder, which was empty, too."""
    Path("kept/theirs").mkdir(parents=True)
    for folder in ("new/a/b", "kept/c/d", "kept/theirs", "full/e", ""):
        new = new_folders(Path(folder))
        Path(folder).mkdir(parents=True, exist_ok=True)
        if folder == "full/e":
            Path("full/file").touch()
        remove_empty(new)
    assert {str(path) for path in Path().rglob("*")} == {"kept", "kept/theirs", "full", "full/file"}


def test_data_takes_the_users_own_choices(capfd):
    Path("mine/dataset").mkdir(parents=True)
    Path("mine/dataset/few.yaml").write_text(
        "name: synthetic\ntask: language_model\nseq_len: 4\ntrain_tokens: 999\ntrain_rows: 9\n"
    )
    assert main(["data", "few", "--config-dir", "mine"]) == 0
    assert "999 train" in capfd.readouterr().out
