"""One line for a person, out of what Hydra and OmegaConf say in several.

Their messages name the fact and then advise in Hydra's words (`+key` to append), which here would only move the
mistake along: the schema is closed. This file keeps the fact and names the nearest thing that would work.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import MarkedYAMLError

from shardlab.config.schema import CHOSEN, Config

TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
"""OmegaConf's names of types, in words."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the closest of the valid names, or an empty text if none is close."""
    lower = {candidate.lower(): candidate for candidate in valid}
    found = get_close_matches(name.lower(), lower, n=1)
    return f"; did you mean '{lower[found[0]]}'?" if found else ""


def keys() -> list[str]:
    """Every dotted key that some config may have, groups included."""
    return list(_keys(Config, ""))


def _keys(schema: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(schema)
    for field in fields(schema):
        key = prefix + field.name
        yield key
        classes = set(CHOSEN.get(key, {}).values()) or {hints[field.name]}
        for each in classes:
            if is_dataclass(each) and isinstance(each, type):
                yield from _keys(each, f"{key}.")


def unknown_key(key: str) -> str:
    """The line for a key that the config doesn't have: `unknown key 'trainer.stepz'; did you mean ...`."""
    group, _, rest = key.partition(".")
    owners = [
        name for name, schema in CHOSEN.get(group, {}).items() if rest in {field.name for field in fields(schema)}
    ]
    if owners:
        return f"key '{key}' belongs to {' and '.join(f'{group}={name}' for name in owners)}, not to the {group} chosen"
    hint = nearest(key, keys())
    if not hint:  # `lr=1` or `epochs=2`: the right word without its group
        last = key.rpartition(".")[2]
        by_last = {known.rpartition(".")[2]: known for known in keys()}
        found = get_close_matches(last, by_last, n=1)
        hint = f"; did you mean '{by_last[found[0]]}'?" if found else ""
    return f"unknown key '{key}'{hint}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def complaint(error: Exception) -> str:
    """What is wrong, in one line. error: what composing or merging a config raised."""
    text = str(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read '{error.override}': an override is key=value, with quotes around unusual characters"
    if isinstance(error, MarkedYAMLError):
        where = f"{error.problem_mark.name} line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        return f"{where}not YAML: {error.problem}"
    file = re.match(r"In '([^']+)':", text)
    place = f"{file[1]}.yaml: " if file else ""
    cause = next((link for link in _chain(error) if isinstance(link, OmegaConfBaseException)), None)
    if cause is not None:
        return place + _of_value(cause, text)
    appended = re.search(r"An item is already at '([^']+)'", text)
    if appended:
        return f"{appended[1]} exists: set it without the plus sign"
    package = re.search(r"looks like a config group override, but config group '([^']+)'", text)
    if package:
        return unknown_key(package[1])
    return " ".join(line.strip() for line in text.splitlines() if line.strip()) or type(error).__name__


def _missing_choice(error: MissingConfigException) -> str:
    name = error.missing_cfg_file or ""
    group, _, choice = name.rpartition("/")
    if not group:
        return f"no config named '{name}' in the search path"
    options = list(error.options or [])
    if not options:
        return f"{group}={choice}: there is no group '{group}'"
    return f"unknown {group}={choice}{nearest(choice, options)} ({group} is one of {', '.join(sorted(options))})"


def _of_value(error: OmegaConfBaseException, outer: str) -> str:
    overridden = re.search(r"Could not override '([^']+)'", outer)
    key = error.full_key or ""
    if overridden and not key.startswith(overridden[1]):  # the override's own key is the longer story
        key = overridden[1]
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key)
    if isinstance(error, MissingMandatoryValue):
        missing = re.search(r"missing mandatory value: (\w+)", first)
        return f"{missing[1] if missing and not key else key} must be given"
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {first}"
    wrong_type = re.match(r"Value (.+) of type '(\w+)' could not be converted to (\w+)", first)
    if wrong_type:
        return f"{key} must be {TYPES.get(wrong_type[3], wrong_type[3])}, not {wrong_type[1]}"
    if " is not a valid bool" in first:
        return f"{key} must be true or false, not {first.removeprefix('Value ').partition(' is not')[0]}"
    if "is not a ListConfig" in first or "DictConfig with ListConfig" in first:
        return f"{key} must be a list, such as {key}=[3,1]"
    if "is not a subclass" in first and "NoneType" in first:
        return f"{key} must not be null"
    if first.startswith("Invalid type assigned"):
        return f"{key} holds several keys; set {key}.KEY, not {key} itself"
    enum = re.match(r"Invalid value (.+), expected one of \[(.+)\]", first)
    if enum:
        return f"{key}={enum[1].strip(chr(39))} is unknown; it is one of {enum[2]}"
    if re.search(r"non[- ]?optional|not Optional|None.*not supported", first, re.IGNORECASE):
        return f"{key} must not be null"
    return f"{key}: {first}" if key else first
