"""`shardlab train`: a real application of Hydra's behind a thin shim.

The shim reads the words first, because Hydra fails on flags between overrides, accepts some mistakes in silence and
answers others with a traceback. It puts flags last, refuses the silent ones, runs `@hydra.main` and maps what comes
back to one line or an exit status. An error inside a job is stored and raised afterwards: Hydra would announce it.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig

from shardlab import __version__
from shardlab.cluster.room import with_ranks
from shardlab.completion import complete
from shardlab.config.complaint import complaint, nearest
from shardlab.config.compose import COMPOSITION_ERRORS, PACKAGE, VERSION_BASE, composing, to_config
from shardlab.config.overrides import check_folders, check_overrides
from shardlab.errors import ShardlabError
from shardlab.launch.application import Jobs, OneJob

if TYPE_CHECKING:
    from shardlab.cluster.lead import Lead


def train(words: list[str], lead: "Lead | None" = None) -> int:
    """Do what the words after `shardlab train` ask for; returns the exit status. Raises ShardlabError.

    lead: of the job of several processes that this command has joined
    """
    if "--version" in words:
        print(f"shardlab {__version__}")
        return 0
    flags, rest = read_words(words)
    if lead is not None:
        flags.overrides = with_ranks(flags.overrides, lead.job.ranks)
    if flags.shell_completion:
        query = [word for word in flags.overrides if word.startswith("query=")]
        return complete(query[0], lambda argv: _one(argv, OneJob())) if query else _one(words, OneJob())
    if flags.hydra_help or flags.info:
        return _one([*flags.overrides, *rest], OneJob())

    compose: dict[str, Any] = {"config_name": flags.config_name or "config", "config_dir": flags.config_dir}
    sweeps = flags.multirun or is_multirun(flags.overrides, compose)
    parsed = check_overrides(flags.overrides, sweep=sweeps)
    check_folders(flags.config_dir, parsed)
    if sweeps and not flags.help and not flags.cfg:
        from shardlab.sweeps.app import sweep

        def call(folder: str, jobs: Jobs) -> None:
            _call([*flags.overrides, f"hydra.sweep.dir={quoted(folder)}", *rest], jobs, words)

        return sweep(words, flags.overrides, compose, call, lead)
    if not flags.help:
        with composing(flags.overrides, **compose) as cfg:
            run_dir = str(cfg.hydra.run.dir)
            if flags.cfg in ("job", "all"):
                to_config(cfg)  # Hydra would show a key that doesn't exist without a word
    if flags.help or flags.cfg:
        return _one([*flags.overrides, *rest], OneJob())
    return _one([*flags.overrides, f"hydra.run.dir={quoted(run_dir)}", *rest], OneJob(run_dir, lead), words)


def read_words(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Hydra's flags wherever they stand: what they say, overrides included, and the words that are no overrides.

    Raises ShardlabError for a flag that doesn't exist, or two that exclude each other.
    """
    parser = get_args_parser()
    known = [option for action in parser._actions for option in action.option_strings]

    def fail(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        hint = nearest(unknown, known) if unknown != message.split(" ")[0] else ""
        raise ShardlabError(f"shardlab train: {message}{hint}")

    vars(parser)["error"] = fail
    flags = parser.parse_intermixed_args(words)
    modes = [
        name
        for name, given in (
            ("--run", flags.run),
            ("--cfg", flags.cfg),
            ("-m", flags.multirun),
            ("-sc", flags.shell_completion),
            ("--info", flags.info),
        )
        if given
    ]
    if len(modes) > 1:
        raise ShardlabError(f"{' and '.join(modes)} exclude each other; give one of them")
    if flags.resolve and not (flags.cfg or flags.help):
        raise ShardlabError("--resolve goes with --cfg job or --help")
    if flags.experimental_rerun is not None:
        raise ShardlabError("--experimental-rerun would unpickle a file; give the run's overrides again instead")
    rest = list(words)
    for word in flags.overrides:
        rest.remove(word)
    return flags, rest


def is_multirun(overrides: list[str], compose: dict[str, Any]) -> bool:
    """Whether the config itself asks for a sweep: an override does, or an experiment or a primary config of the
    user's by `hydra.mode: MULTIRUN`."""
    if any(word.upper() == "HYDRA.MODE=MULTIRUN" for word in overrides):
        return True
    chosen = any(word.lstrip("+").startswith("experiment=") for word in overrides)
    if not chosen and compose["config_dir"] is None:
        return False  # no file that could ask, so nothing is composed for it
    with contextlib.suppress(ShardlabError), composing(overrides, sweep=True, **compose) as cfg:
        return cfg.hydra.mode is RunMode.MULTIRUN
    return False


def quoted(text: str) -> str:
    """The text as a value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _one(argv: list[str], job: OneJob, words: list[str] | None = None) -> int:
    """Call Hydra's application for one job, or for one of Hydra's own answers; returns the exit status."""
    _call(argv, job, words)
    return job.status()


def _call(argv: list[str], jobs: Jobs, words: list[str] | None = None) -> None:
    """Call Hydra's application with argv. jobs: what it is to run; words: what the user wrote, for their records."""

    def application(cfg: DictConfig) -> Any:
        sys.argv = ["shardlab", "train", *(words or [])]
        return jobs.run(cfg)

    vars(application)["jobs"] = jobs  # where hydra/launcher=shardlab finds them
    with _process_state(argv):
        try:
            hydra.main(config_path=f"pkg://{PACKAGE}", config_name="config", version_base=VERSION_BASE)(application)()
        except COMPOSITION_ERRORS as error:
            if jobs.started or isinstance(error, BrokenPipeError):
                raise
            raise ShardlabError(complaint(error)) from None
        except SystemExit as end:  # Hydra leaves so after --help
            if end.code not in (0, None):
                raise


@contextlib.contextmanager
def _process_state(argv: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and raises its errors to the caller only under HYDRA_FULL_ERROR."""
    saved, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["shardlab", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = saved
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
