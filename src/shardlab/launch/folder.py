"""The run folder: claimed by exactly one run, and complete before the first rank starts.

config.yaml is the config that `shardlab` can read back; .hydra/ is the same, with Hydra's own settings, where Hydra's
users look for it; provenance.json says where the run came from. Its creation is the claim: of two launchers with one
folder, the second is refused.
"""

import json
import os
import re
import shutil
import uuid
from fnmatch import fnmatch
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from shardlab.config.compose import Composed
from shardlab.config.schema import AXES, Config
from shardlab.data.prepared import Meta
from shardlab.errors import ShardlabError
from shardlab.launch.job import Job
from shardlab.launch.new_folder import check_place, new_folders, remove_empty
from shardlab.parallel.mesh import name_of
from shardlab.tracking.provenance import provenance, without_credentials
from shardlab.tracking.record import EVENTS, LINK, PROVENANCE

LONGEST_RUN_NAME = 250
"""Characters; MLflow's databases take no more."""


def run_name(config: Config, own: str = "") -> str:
    """The name that tables and MLflow show: the user's own, or model, mesh and seed: "tiny-ddp2-s1".

    own: the overrides that tell a sweep's job from the others; those that the name doesn't say yet are added to it
    """
    given = config.tracking.run_name
    said = ("tracking.run_name",) if given else NAMED
    words = [given or f"{config.model.name}-{name_of(config.strategy)}-s{config.seed}"]
    for word in re.split(r" (?=\+*[\w./-]+=)", without_credentials(own)):
        key, _, value = word.lstrip("+").partition("=")
        if word and key not in said and (given or not _is_named(config, key, value)):
            words.append(word)
    name = " ".join(words)
    return name if len(name) <= LONGEST_RUN_NAME else f"{name[: LONGEST_RUN_NAME - 3]}..."


NAMED = ("seed", "ranks", "model.name", "strategy.schedule", *(f"strategy.{axis}" for axis in AXES))
"""Keys that a run's name says."""


def _is_named(config: Config, group: str, choice: str) -> bool:
    """Whether a choice shows in the run's name: model=tiny, and strategy=pipeline_naive in "pipeline2-naive"."""
    if group == "model":
        return choice == config.model.name
    parts = name_of(config.strategy).split("-")
    return group == "strategy" and all(any(part.startswith(w) for part in parts) for w in choice.split("_"))


WRITTEN = ("config.yaml", ".hydra", LINK, "rank-[0-9]*", "checkpoints", "report")
"""What a run writes into its folder, beside the two files that say that it is one."""


def refuse_used(folder: Path) -> None:
    """Raise ShardlabError if the folder already holds a run, or something of the user's that a run would overwrite."""
    check_place(folder, "run_dir")
    names = sorted(os.listdir(folder)) if folder.exists() else []  # not exists(): a link into nowhere is there as well
    if PROVENANCE in names or EVENTS in names:
        raise ShardlabError(f"run_dir={folder} already holds a run; give another folder, or none for a new one")
    for name in names:
        if any(fnmatch(name, pattern) for pattern in WRITTEN):
            raise ShardlabError(
                f"run_dir={folder} holds {name}, which a run would overwrite; "
                f"give an empty folder or a new one, such as run_dir={folder / 'run'}"
            )


def make_folder(
    folder: Path, composed: Composed, data: Meta, job: Job | None = None, hydra: DictConfig | None = None
) -> str:
    """Make and claim the run's folder and write everything that is known beforehand. Returns the run's name.

    job: of a sweep; hydra: Hydra's own node of the config
    Raises ShardlabError if the folder can't be had.
    """
    name = run_name(composed.config, "" if job is None else job.what)
    about = provenance(
        run_id=uuid.uuid4().hex,
        name=name,
        overrides=composed.overrides,
        choices=composed.choices,
        config_hash=composed.hash,
        data={"name": data.name, "fingerprint": data.fingerprint},
        sweep=None if job is None else job.sweep,
        job=None if job is None else job.number,
        own_overrides=None if job is None else job.what,
    )
    config = without_credentials(composed.yaml)
    overrides = [f"- {json.dumps(word, ensure_ascii=False)}" for word in about["overrides"]]
    new = new_folders(folder, "run_dir")
    claimed = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_used(folder)
        try:
            claim = (folder / PROVENANCE).open("x", encoding="utf-8")
        except FileExistsError:
            refuse_used(folder)
            raise
        claimed = True
        with claim:
            json.dump(about, claim, indent=2, ensure_ascii=False)
            claim.write("\n")
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "config.yaml").write_text(config, encoding="utf-8")
        (folder / ".hydra" / "overrides.yaml").write_text("\n".join(overrides or ["[]"]) + "\n", encoding="utf-8")
        if hydra is not None:
            node = without_credentials(OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra})))
            (folder / ".hydra" / "hydra.yaml").write_text(node, encoding="utf-8")
    except OSError as error:
        if claimed:  # the disk is full: all of these are ours, for there were none
            for written in ("config.yaml", PROVENANCE):
                (folder / written).unlink(missing_ok=True)
            shutil.rmtree(folder / ".hydra", ignore_errors=True)
        remove_empty(new)
        raise ShardlabError(f"run_dir={folder} can't be written: {error.strerror or error}") from error
    return name
