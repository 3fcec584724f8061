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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from shardlab import __version__
from shardlab.completion import complete
from shardlab.config import check
from shardlab.config.complaint import complaint, nearest
from shardlab.config.compose import COMPOSITION_ERRORS, PACKAGE, VERSION_BASE, composing, to_config
from shardlab.config.overrides import check_folders, check_overrides
from shardlab.config.room import with_ranks
from shardlab.errors import ShardlabError
from shardlab.launch.jobs import Jobs, OneJob, SweepJobs, new_folders, remove_empty
from shardlab.launch.signals import Signals
from shardlab.parallel.mesh import mesh_of

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
        return complete(query[0], lambda argv: _call(argv, OneJob())) if query else _call(words, OneJob())
    if flags.hydra_help or flags.info:
        return _call([*flags.overrides, *rest], OneJob())

    sweep = flags.multirun or any(word.upper() == "HYDRA.MODE=MULTIRUN" for word in flags.overrides)
    parsed = check_overrides(flags.overrides, sweep=sweep)
    check_folders(flags.config_dir, parsed)
    compose: dict[str, Any] = {"config_name": flags.config_name or "config", "config_dir": flags.config_dir}
    if sweep and not flags.help:
        return _sweep(words, flags.overrides, rest, compose, lead)
    if not flags.help:
        with composing(flags.overrides, **compose) as cfg:
            run_dir = str(cfg.hydra.run.dir)
            if flags.cfg in ("job", "all"):
                to_config(cfg)  # Hydra would show a key that doesn't exist without a word
    if flags.help or flags.cfg:
        return _call([*flags.overrides, *rest], OneJob())
    return _call([*flags.overrides, f"hydra.run.dir={quoted(run_dir)}", *rest], OneJob(run_dir, lead), words)


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


def _sweep(
    words: list[str], overrides: list[str], rest: list[str], compose: dict[str, Any], lead: "Lead | None"
) -> int:
    """Run each combination. The folder is fixed beforehand, so that a sweep that cannot be composed leaves none."""
    from shardlab.launch.folder import MULTIRUN, refuse_used_sweep
    from shardlab.launch.sweep import Sweep
    from shardlab.tracking.sweep_parent import SWEEP

    with composing(overrides, sweep=True, **compose) as cfg:
        folder = Path(cfg.hydra.sweep.dir)
        loader = GlobalHydra.instance().config_loader()  # it knows the names that a glob stands for
        parsed = OverridesParser.create(loader).parse_overrides(overrides)
        jobs_overrides = BasicSweeper.split_arguments(parsed, None)[0] if check.visible_gpus() else []
    refuse_used_sweep(folder)
    varied = [override.key_or_group for override in parsed if override.is_sweep_override()]
    parent = Sweep(folder, ["shardlab", "train", *words])
    jobs = SweepJobs(folder, varied, _most_ranks(jobs_overrides, compose), parent, lead)
    new, interrupted = new_folders(folder), True
    with Signals() as signals:
        try:
            with signals.raising():
                status = _call([*overrides, f"hydra.sweep.dir={quoted(str(folder))}", *rest], jobs, words)
            interrupted = False
        except Exception:
            interrupted = False
            raise
        finally:
            if parent.begun:
                seen = signals.count
                refused = sum(row.status == "refused" for row in jobs.rows)
                parent.finish(interrupted=interrupted, refused=refused, give_up=lambda: signals.count > seen)
            elif not (folder / SWEEP).exists():  # else another command's sweep is at home there
                (folder / MULTIRUN).unlink(missing_ok=True)
                remove_empty(new)
    signals.check()  # one that came while the end was being written
    return status


def _most_ranks(jobs: list[list[str]], compose: dict[str, Any]) -> int:
    """The most ranks that any job of a sweep uses; `auto` takes the GPUs only if all jobs fit. jobs: overrides of each.

    Each is composed, for an experiment may choose the strategy. One that cannot be will be refused, and needs none.
    """
    most = 1
    for overrides in jobs:
        with contextlib.suppress(ShardlabError), composing(overrides, **compose) as cfg:
            config = to_config(cfg)
            most = max(most, mesh_of(config.strategy).ranks)
    return most


def quoted(text: str) -> str:
    """The text as a value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _call(argv: list[str], jobs: Jobs, words: list[str] | None = None) -> int:
    """Call Hydra's application with argv. jobs: what it is to run; words: what the user wrote, for their records."""

    @hydra.main(config_path=f"pkg://{PACKAGE}", config_name="config", version_base=VERSION_BASE)
    def application(cfg: DictConfig) -> float | None:
        sys.argv = ["shardlab", "train", *(words or [])]
        return jobs.run(cfg)

    with _process_state(argv):
        try:
            application()
        except COMPOSITION_ERRORS as error:
            if jobs.started or isinstance(error, BrokenPipeError):
                raise
            raise ShardlabError(complaint(error)) from None
        except SystemExit as end:  # Hydra leaves so after --help
            if end.code not in (0, None):
                raise
    return jobs.status()


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
