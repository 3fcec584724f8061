"""The run folder: claimed by exactly one run, and complete before the first rank starts.

config.yaml is the config that `shardlab` can read back; .hydra/ is the same, with Hydra's own settings, where Hydra's
users look for it; provenance.json says where the run came from. Its creation is the claim: of two launchers with one
folder, the second is refused.
"""

import json
import os
import shutil
import uuid
from fnmatch import fnmatch
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from shardlab.config.compose import Composed
from shardlab.config.schema import Config
from shardlab.data.prepared import Meta
from shardlab.errors import ShardlabError
from shardlab.launch.new_folder import check_place, new_folders, remove_empty
from shardlab.parallel.mesh import name_of
from shardlab.tracking.provenance import provenance, without_credentials
from shardlab.tracking.record import EVENTS, LINK, PROVENANCE
from shardlab.tracking.sweep_parent import SWEEP

MULTIRUN = "multirun.yaml"
"""What Hydra writes into a sweep's folder."""


def run_name(config: Config) -> str:
    """The name that tables and MLflow show: the user's own, or model, mesh and seed: "tiny-ddp2-s1"."""
    return config.tracking.run_name or f"{config.model.name}-{name_of(config.strategy)}-s{config.seed}"


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


def refuse_used_sweep(folder: Path) -> None:
    """Raise ShardlabError if the folder already holds a sweep."""
    check_place(folder, "hydra.sweep.dir")
    if any(os.path.lexists(folder / name) for name in (MULTIRUN, SWEEP)):
        raise ShardlabError(
            f"hydra.sweep.dir={folder} already holds a sweep; give another folder, or none for a new one"
        )


def make_folder(
    folder: Path, composed: Composed, data: Meta, sweep: Path | None = None, hydra: DictConfig | None = None
) -> str:
    """Make and claim the run's folder and write everything that is known beforehand. Returns the run's name.

    sweep: folder of the sweep that the run is a job of; hydra: Hydra's own node of the config
    Raises ShardlabError if the folder can't be had.
    """
    name = run_name(composed.config)
    about = provenance(
        run_id=uuid.uuid4().hex,
        name=name,
        overrides=composed.overrides,
        choices=composed.choices,
        data={"name": data.name, "fingerprint": data.fingerprint},
    )
    about["sweep"] = None if sweep is None else str(sweep)
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
