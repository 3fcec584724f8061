"""The command `shardlab`: one small function a subcommand, one line for a mistake, one exit status for each end.

0 finished; 1 a run failed; 2 config or data wrong; 130 and 143 interrupted. `train` is an application of Hydra's
(hydra_app.py); the others are plain. Nothing heavy is imported before a subcommand needs it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardlab import __version__
from shardlab.errors import ShardlabError
from shardlab.launch.streams import give_up, open_missing

HELP = """\
shardlab: one config, one training run, any partitioning.

  shardlab train [key=value ...]   train; -m runs each combination of comma-separated values
  shardlab plan [key=value ...]    what each rank would hold, send and wait for; starts nothing; -m compares candidates
  shardlab data NAME [--check]     fetch and prepare a dataset ahead of time, or say where it is looked for
  shardlab parity key=a,b [...]    train a few steps under each split; are the numbers the same?
  shardlab compare RUN...          a table of runs: loss, speed, memory, largest difference
  shardlab sync RUN                ship the record of a run, or of a sweep's runs, to MLflow again

A RUN is a run folder, an id or the beginning of one, a run's name, or `last`.
`shardlab train --help` lists every choice and key; `shardlab COMMAND --help` explains the others.
For completion with the Tab key: eval "$(shardlab train -sc install=bash)"
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line, status 2."""

    def error(self, message: str) -> NoReturn:
        raise ShardlabError(f"{self.prog}: {message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status. argv: the words after `shardlab`, by default the process's."""
    open_missing()
    try:
        status = _dispatch(sys.argv[1:] if argv is None else argv)
    except ShardlabError as error:
        print(" ".join(str(error).split("\n")), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `shardlab train --help | head`: nobody reads on
        give_up(sys.stdout)
        return 0
    try:
        sys.stdout.flush()
    except OSError:
        give_up(sys.stdout)
    return status


def _dispatch(words: list[str]) -> int:
    if not words:
        raise ShardlabError(f"which command? {', '.join(COMMANDS)} (see shardlab --help)")
    command, *rest = words
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(f"shardlab {__version__}")
        return 0
    if command in ("-sc", "--shell-completion"):
        return _train(words)
    if command not in COMMANDS:
        from difflib import get_close_matches

        found = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean '{found[0]}'?" if found else f"the commands are {', '.join(COMMANDS)}"
        if "=" in command and not found:
            hint = f"did you mean 'shardlab train {command}'?"
        raise ShardlabError(f"unknown command '{command}'; {hint}")
    return COMMANDS[command](rest)


def _train(words: list[str]) -> int:
    from shardlab.cluster.environment import find_job
    from shardlab.tracking.store import set_environment

    set_environment()
    job = find_job()
    if job is not None and job.rank > 0:
        from shardlab.cluster.follow import follow

        return follow(job)

    from shardlab.hydra_app import train

    if job is None:
        return train(words)

    from shardlab.cluster.lead import connect

    with connect(job) as lead:
        lead.status = train(words, lead)
        return lead.status


def _plan(words: list[str]) -> int:
    parser = _Parser(
        prog="shardlab plan",
        description="What each rank of a run would hold, send and wait for; starts nothing. Takes what train takes, "
        "group=choice and key=value (see shardlab train --help). With plan.memory_gib=X it says what fits in X GiB a "
        "rank. Values of optimizer.kwargs are left for torch to judge when the run starts.",
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="as for train")
    parser.add_argument("-m", "--multirun", action="store_true", help="a row for each combination: strategy=ddp,zero3")
    parser.add_argument("--shapes", action="store_true", help="list every parameter, not one line for each kind")
    parser.add_argument("--config-dir", metavar="DIR", help="your own choices: DIR/model/mine.yaml is then model=mine")
    arguments = parser.parse_intermixed_args(words)

    from shardlab.analysis.candidates import plan_many, plan_one
    from shardlab.analysis.plan import Plan
    from shardlab.analysis.plan_text import candidates_text, plan_text

    if not arguments.multirun:
        plan = plan_one(arguments.overrides, arguments.config_dir)
        for note in plan.notes:
            print(note, file=sys.stderr)
        print(plan_text(plan, every_shape=arguments.shapes))
        return 0
    candidates = plan_many(arguments.overrides, arguments.config_dir)
    print(candidates_text(candidates))
    return 0 if any(isinstance(candidate.plan, Plan) for candidate in candidates) else 2


def _data(words: list[str]) -> int:
    parser = _Parser(prog="shardlab data", description="Fetch and prepare a dataset, or say where it is looked for.")
    parser.add_argument("name", metavar="NAME", help="wikitext2, nsmc, pydoc, synthetic, or a choice of your own")
    parser.add_argument("overrides", metavar="dataset.KEY=VALUE", nargs="*", help="as for train, such as dataset.path=")
    parser.add_argument("--config-dir", metavar="DIR", help="your own choices: DIR/dataset/NAME.yaml")
    parser.add_argument("--check", action="store_true", help="say what is there and check it; write nothing")
    arguments = parser.parse_intermixed_args(words)

    from shardlab.config.check import check_dataset
    from shardlab.config.compose import composed_from, composing
    from shardlab.config.overrides import check_folders, check_overrides
    from shardlab.data.describe import describe

    overrides = [f"dataset={arguments.name}", *arguments.overrides]
    check_folders(arguments.config_dir, check_overrides(overrides))
    with composing(overrides, config_dir=arguments.config_dir) as cfg:
        config = composed_from(cfg, cfg.hydra).config
    check_dataset(config)
    print(describe(config.dataset, check=arguments.check))
    return 0


def _parity(words: list[str]) -> int:
    parser = _Parser(
        prog="shardlab parity",
        description="Train a few steps (trainer.steps, 5 by default) under each of the listed values, and compare "
        "losses, norms and final tensors with those of the first; one value is compared with strategy=single. "
        "Exit status 0: the same, within the precision's rounding; 1: not the same; 2: wrong config.",
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="+", help="as for train -m: strategy=single,ddp,tensor")
    parser.add_argument("--config-dir", metavar="DIR", help="your own choices: DIR/model/NAME.yaml")
    arguments = parser.parse_intermixed_args(words)

    from shardlab.cluster.environment import find_job

    if (job := find_job()) is not None and job.ranks > 1:
        raise ShardlabError(f"shardlab parity can't join a job of {job.ranks} processes; start it in one")

    from shardlab.launch.parity import parity

    return parity(arguments.overrides, arguments.config_dir)


def _compare(words: list[str]) -> int:
    parser = _Parser(prog="shardlab compare", description="A table of runs. One run of a sweep stands for the sweep.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder, sweep folder, id, prefix, name, or last")
    arguments = parser.parse_args(words)

    from shardlab.analysis.table import compare

    print(compare([folder for text in arguments.runs for folder in _runs(text, alone=len(arguments.runs) == 1)]))
    return 0


def _runs(text: str, alone: bool) -> list[Path]:
    """The run folders that a RUN names: a sweep's folder names its jobs, and so does its `last` run, if given alone."""
    from shardlab.tracking.record import EVENTS, find_run

    folder = Path(text)
    if not (folder / "multirun.yaml").is_file():
        folder = find_run(text)
        if not (alone and text == "last" and (folder.parent / "multirun.yaml").is_file()):
            return [folder]
        folder = folder.parent
    from shardlab.sweeps.rows import Rows

    # A job that was tried again has several folders, and its row names the last.
    jobs = [folder / row.folder for row in Rows(folder).read() if (folder / row.folder / EVENTS).is_file()]
    if not jobs:
        raise ShardlabError(f"{folder}: no job of this sweep has a record")
    return jobs


def _sync(words: list[str]) -> int:
    parser = _Parser(
        prog="shardlab sync", description="Ship a run's record to MLflow from its beginning; harmless twice."
    )
    parser.add_argument("run", metavar="RUN", help="run folder, sweep folder, id, prefix of an id, name, or last")
    arguments = parser.parse_args(words)

    from shardlab.tracking.mlflow_sink import sync
    from shardlab.tracking.store import set_environment

    set_environment()
    for folder in _runs(arguments.run, alone=True):
        sync(folder)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "data": _data,
    "parity": _parity,
    "compare": _compare,
    "sync": _sync,
}
"""Subcommand -> its function, which takes the words after it and returns the exit status."""
