"""From overrides to one typed config.

Hydra composes YAML; the schema is merged over the plain result afterwards. Both steps are needed: a typed node
alone lets `+model.typo=5` pass in silence, and dataset and scheduler have different keys for each choice.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from shardlab.config.complaint import complaint, nearest
from shardlab.config.identity import config_hash
from shardlab.config.overrides import GROUPS, check_overrides
from shardlab.config.schema import CHOSEN, Config
from shardlab.errors import ShardlabError

PACKAGE = "shardlab.conf"
"""Where the packaged YAML is, as a module."""

VERSION_BASE = "1.3"
"""The behaviour of Hydra that the package is written for."""

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError)
"""What composing a config raises for a mistake in an override or in a user's file."""


@dataclass(frozen=True)
class Composed:
    """A config and where it came from.

    yaml: the config as text, without interpolations; `to_config` reads it back
    overrides: what the user wrote, without Hydra's own settings
    choices: group -> chosen name; `experiment` too if one was chosen
    hash: of the config as asked for; see identity.py
    """

    config: Config
    yaml: str
    overrides: list[str]
    choices: dict[str, str]
    hash: str


def register_schema() -> None:
    """Offer the schema to Hydra, at the root only: inside a group it would be listed as a choice."""
    schema = OmegaConf.structured(Config)
    OmegaConf.set_struct(schema.optimizer.kwargs, False)  # optimizer.kwargs.momentum=0.9 needs no plus sign
    ConfigStore.instance().store(name="_schema", node=schema, provider="shardlab")


register_schema()


def compose(overrides: list[str]) -> Composed:
    """Compose the packaged config with overrides, as `shardlab train` does; for use from Python.

    Ranges and rules across keys are not looked at here (see check.py). Raises ShardlabError for any other mistake.
    """
    check_overrides(overrides)
    with composing(overrides) as cfg:
        return composed_from(cfg, cfg.hydra)


@contextmanager
def composing(
    overrides: list[str], *, config_name: str = "config", config_dir: str | None = None, sweep: bool = False
) -> Iterator[DictConfig]:
    """The whole composed config, Hydra's node included. Hydra's global state is borrowed meanwhile and given back,
    so that this works inside another Hydra application and in a notebook.

    config_dir: the user's folder of choices. sweep: compose the parent of a sweep, whose overrides may hold several
    values. Raises ShardlabError.
    """
    search_path = create_config_search_path(f"pkg://{PACKAGE}")
    if config_dir is not None:
        folder = f"file://{Path(config_dir).absolute()}"
        search_path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    borrowed = [GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance(), JobRuntime.instance()]
    saved = [dict(vars(state)) for state in borrowed]
    try:
        GlobalHydra.instance().clear()
        setbase(VERSION_BASE)
        hydra = Hydra.create_main_hydra2("shardlab", search_path)
        try:
            cfg = hydra.compose_config(config_name, overrides, RunMode.MULTIRUN if sweep else RunMode.RUN)
            refuse_code(cfg.hydra)
        except RecursionError:
            raise ShardlabError("the config refers to itself: a file lists itself, or an alias its owner") from None
        except AssertionError:  # OmegaConf's, for an item of a list that is null
            raise ShardlabError(
                "an override sets an item of a list that is null; give the whole list, such as strategy.split=[3,1]"
            ) from None
        except (TypeError, KeyError, IndexError, AttributeError) as error:  # Hydra's own, for odd values of its keys
            raise ShardlabError(f"Hydra can't compose this: {type(error).__name__}: {error}") from None
        HydraConfig.instance().set_config(cfg)
        yield cfg
    except COMPOSITION_ERRORS as error:
        raise ShardlabError(complaint(error)) from None
    finally:
        for state, values in zip(borrowed, saved, strict=True):
            vars(state).update(values)


def refuse_code(hydra: DictConfig) -> None:
    """Refuse a config of Hydra's own that names code to run: somebody else's config may choose, not import.

    Callbacks, and a logger's factories and classes, would be imported from wherever the config says; a launcher or
    sweeper is taken from Hydra and its installed plugins. Raises ShardlabError.
    """
    if hydra.get("callbacks"):
        raise ShardlabError(
            f"hydra.callbacks would run code that the config names ({', '.join(hydra.callbacks)}); drop it"
        )
    for part in ("launcher", "sweeper"):
        target = str(OmegaConf.select(hydra, f"{part}._target_", default=""))
        if not target.startswith(("hydra.", "hydra_plugins.")):
            raise ShardlabError(f"hydra.{part} names {target!r}; choose an installed one: hydra/{part}=NAME")
    for part in ("job_logging", "hydra_logging"):
        for key, value in _leaves(OmegaConf.to_container(hydra[part])):
            if key in ("()", "class") and not str(value).startswith("logging."):
                raise ShardlabError(f"hydra.{part} names {value!r} to run; only classes of logging are taken")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def composed_from(cfg: DictConfig, hydra: DictConfig) -> Composed:
    """The typed config with what was overridden and chosen. hydra: Hydra's own node. Raises ShardlabError."""
    choices = hydra.runtime.choices
    for group in GROUPS:
        if not isinstance(choices.get(group), str):
            raise ShardlabError(f"{group} needs exactly one choice; its file or experiment makes {choices.get(group)}")
    config = to_config(cfg)
    return Composed(
        config=config,
        yaml=config_yaml(config),
        overrides=list(hydra.overrides.task),
        choices={group: choices[group] for group in (*GROUPS, "experiment") if choices.get(group) is not None},
        hash=config_hash(config),
    )


def to_config(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """The typed config of a composed one, or of one loaded from a run's config.yaml.

    Raises ShardlabError for an unknown key, a wrong type, a missing value or an interpolation that leads nowhere.
    """
    try:
        node = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
        if "hydra" in node:  # a copy only where it must be: it forgets what ${now:} gave
            node = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
        plain = cast(dict[str, Any], OmegaConf.to_container(node, resolve=True, enum_to_str=True))
        schema = OmegaConf.structured(Config)
        for group, classes in CHOSEN.items():
            schema[group] = OmegaConf.structured(_chosen(group, classes, plain.get(group)))
        config = OmegaConf.to_object(OmegaConf.merge(schema, plain))
        OmegaConf.structured(config)  # merging lets the items of a list pass as they are
    except OmegaConfBaseException as error:
        raise ShardlabError(complaint(error)) from None
    assert isinstance(config, Config)
    return config


def _chosen(group: str, classes: dict[str, type], given: Any) -> type:
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in classes:
        raise ShardlabError(f"unknown {group}.name={name}{nearest(str(name), classes)} (one of {', '.join(classes)})")
    return classes[name]


def config_yaml(config: Config) -> str:
    """The config as YAML text without interpolations, enums by their names; `to_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
