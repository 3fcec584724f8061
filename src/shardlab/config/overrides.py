"""What may stand on the command line, checked before Hydra composes it.

Hydra accepts in silence several things that would train something else: `~model` drops a group, `model=[a,b]`
takes the first config and merges the second, a user's file of a packaged name is never read. Each is refused here.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from shardlab.config.complaint import complaint
from shardlab.errors import ShardlabError

GROUPS = ("model", "strategy", "dataset", "optimizer", "scheduler", "precision", "tracking")
"""The groups of which a run needs exactly one choice each. `experiment` is a group too, but needs none."""

OURS = {
    "hydra.run.dir": "set run_dir=FOLDER instead",
    "hydra.output_subdir": "the run folder always keeps .hydra/",
    "hydra.job.chdir": "a run's paths are relative to the folder that you start it in",
}
"""Hydra's settings that shardlab has made already, and what to do."""


def packaged_choices(group: str) -> list[str]:
    """The names that shardlab brings for a group, sorted."""
    folder = files("shardlab.conf") / group
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Hydra's reading of each override. Raises ShardlabError for one that cannot be read."""
    for word in overrides:
        if not isinstance(word, str):
            raise ShardlabError(f"overrides are texts such as 'model=tiny', not {word!r}")
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ShardlabError(complaint(error)) from None


def check_overrides(overrides: list[str], *, sweep: bool = False) -> list[Override]:
    """Refuse what Hydra would take in silence or answer with a traceback; return the parsed overrides.

    sweep: the overrides may hold several values each. Raises ShardlabError.
    """
    parsed = parse_overrides(overrides)
    for override in parsed:
        _check_override(override, sweep)
    return parsed


def _check_override(override: Override, sweep: bool) -> None:
    key, word = override.key_or_group, override.input_line
    if override.is_delete():
        raise ShardlabError(f"'{word}' takes a part of the config away, and each is needed; set it to something else")
    if override.package is not None:
        raise ShardlabError(f"'{word}' would put a choice at another place, with '@'; shardlab has one place for each")
    if key in OURS:
        raise ShardlabError(f"{key} is not yours to set: {OURS[key]}")
    if sweep and key == "run_dir":
        raise ShardlabError("run_dir is one run's folder; with -m set hydra.sweep.dir=FOLDER, and job N gets FOLDER/N")
    if override.is_sweep_override() and not sweep:
        advice = "add -m to run each"
        if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and key not in GROUPS:
            advice += f", or write {key}=[...] for a list"
        raise ShardlabError(f"'{word}' holds several values; {advice}")
    if key in GROUPS or key == "experiment":
        for value in _values(override):
            _check_choice(key, value)


def _values(override: Override) -> list[Any]:
    """Each value that the override will take; none of them for a glob, which Hydra expands to names."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP or not override.is_discrete_sweep():
        return []
    return list(override.sweep_iterator())


def _check_choice(group: str, value: Any) -> None:
    if isinstance(value, list):
        each = ",".join(str(item) for item in value)
        raise ShardlabError(f"{group} takes one choice, not a list; to run each of them: -m {group}={each}")
    if value is None and group == "experiment":
        return
    if ".." in str(value):
        raise ShardlabError(
            f"{group}={value} leaves the group's folder; {group} is one of {', '.join(packaged_choices(group))}"
        )
    if not isinstance(value, str) and not hasattr(value, "text"):  # text: a quoted string of Hydra's grammar
        shown = "null" if value is None else value
        raise ShardlabError(f"{group}={shown} is no choice; {group} is one of {', '.join(packaged_choices(group))}")


def check_folder(folder: Path) -> None:
    """Refuse a user's folder of configs that is missing, or of which a file would never be read or isn't text.

    Hydra looks into the package first, so a file of the user's with a packaged name loses without a word.
    Raises ShardlabError.
    """
    if not folder.is_dir():
        raise ShardlabError(f"--config-dir {folder}: no such folder")
    packaged = files("shardlab.conf")
    for file in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml"), *folder.glob("hydra/*/*.yaml")]):
        name = file.relative_to(folder)
        if (packaged / name.as_posix()).is_file():
            raise ShardlabError(f"{file} would not be read: shardlab has a {name} of its own; give it another name")
        try:
            if not file.is_file():
                raise ShardlabError(f"{file} is not a file that can be read; give the folder one, or another name")
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ShardlabError(f"{file} is not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise ShardlabError(f"{file} can't be read: {error.strerror or error}") from None


def check_folders(config_dir: str | None, parsed: list[Override]) -> None:
    """`check_folder` for --config-dir and for the file:// entries of hydra.searchpath. Raises ShardlabError."""
    folders = [config_dir] if config_dir is not None else []
    for override in parsed:
        if override.key_or_group == "hydra.searchpath":
            value = override.value()
            entries = [str(entry) for entry in value] if isinstance(value, list) else []
            folders += [entry.removeprefix("file://") for entry in entries if not entry.startswith("pkg://")]
    for folder in folders:
        check_folder(Path(folder))
