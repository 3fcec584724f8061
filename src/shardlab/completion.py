"""Completion with the Tab key, after the subcommand.

Hydra completes `COMMAND key=...`; it knows of no subcommand, fails on flags in the line and ignores --config-dir.
So the line is split here: subcommands, flags and dataset names are ours, and for a word of `train` that is an
override Hydra is asked with a line that holds the overrides alone.
"""

import os
from collections.abc import Callable

from shardlab.config.overrides import packaged_choices
from shardlab.errors import ShardlabError

COMMANDS = ("compare", "data", "parity", "plan", "sync", "train")
"""The subcommands."""

FLAGS = ("--cfg", "--config-dir", "--config-name", "--help", "--hydra-help", "--info", "--multirun", "--resolve")
"""The flags of `train` worth offering."""

VALUES = {
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p"), ()),
}
"""Flags that take a value, and the values to offer; for none of them the shell offers files."""


def complete(shell: str, ask_hydra: Callable[[list[str]], int]) -> int:
    """Answer a shell that has set COMP_LINE and COMP_POINT: print the words that could stand at the cursor.

    shell: `query=bash` or another of Hydra's shells. ask_hydra: calls Hydra's application with the given words.
    """
    line = os.environ.get("COMP_LINE", "")
    line = line[: int(os.environ.get("COMP_POINT") or len(line))]
    words = line.split()
    current = "" if not words or line[-1].isspace() else words.pop()
    offers = _offers(words, current)
    if offers is not None:
        print(" ".join(word for word in offers if word.startswith(current)))
        return 0
    overrides, config_dir = _without_flags(words[2:])
    os.environ["COMP_LINE"] = " ".join(["shardlab", *overrides, current])
    try:
        return ask_hydra(["-sc", shell, *(["--config-dir", config_dir] if config_dir else [])])
    except ShardlabError:  # half a line is often wrong; a message would land in the middle of it
        return 0


def _offers(words: list[str], current: str) -> list[str] | tuple[str, ...] | None:
    """What may follow the words (command first), or None if Hydra is to be asked."""
    if len(words) < 2:
        return COMMANDS if words else ()
    command, last = words[1], words[-1]
    if last in VALUES:
        return VALUES[last]
    if command == "data":
        return ("--check", "--config-dir") if len(words) > 2 else packaged_choices("dataset")
    if command in ("compare", "sync"):
        return ("last",)
    if command == "parity":
        return ("--config-dir",) if current.startswith("-") else None
    if command == "plan":
        return ("--config-dir", "--multirun", "--shapes") if current.startswith("-") else None
    if command != "train":
        return ()
    return FLAGS if current.startswith("-") else None


def _without_flags(words: list[str]) -> tuple[list[str], str | None]:
    """The overrides among the words, and the folder that --config-dir names."""
    overrides, config_dir, flag = [], None, ""
    for word in words:
        if flag in VALUES:
            config_dir = word if flag in ("--config-dir", "-cd") else config_dir
            flag = ""
        elif word.startswith("-"):
            name, _, value = word.partition("=")
            config_dir = value if name == "--config-dir" and value else config_dir
            flag = "" if value else word
        else:
            overrides.append(word)
    return overrides, config_dir if config_dir and os.path.isdir(config_dir) else None
