"""The run folder: claimed by exactly one run, and complete before the first rank starts.

config.yaml is the config that `shardlab` can read back; .hydra/ is the same where Hydra's users look for it;
provenance.json says where the run came from. Its creation is the claim: of two launchers with one folder, the
second is refused.
"""

import json
import uuid
from pathlib import Path

from shardlab.config.compose import Composed
from shardlab.config.schema import Config
from shardlab.data.prepared import Meta
from shardlab.errors import ShardlabError
from shardlab.parallel.mesh import AXES, Mesh
from shardlab.tracking.provenance import provenance, without_credentials
from shardlab.tracking.record import EVENTS, PROVENANCE


def run_name(config: Config) -> str:
    """The name that tables and MLflow show: the user's own, or model, mesh and seed: "tiny-ddp2-s1"."""
    mesh = Mesh(**{axis: getattr(config.strategy, axis) for axis in AXES})
    return config.tracking.run_name or f"{config.model.name}-{mesh.name}-s{config.seed}"


def refuse_used(folder: Path) -> None:
    """Raise ShardlabError if the folder already holds a run."""
    for name in (PROVENANCE, EVENTS):
        if (folder / name).exists():
            raise ShardlabError(f"run_dir={folder} already holds a run; give another folder, or none for a new one")


def make_folder(folder: Path, composed: Composed, data: Meta, sweep: Path | None) -> str:
    """Make and claim the run's folder and write everything that is known beforehand. Returns the run's name.

    sweep: folder of the sweep that the run is a job of. Raises ShardlabError if the folder can't be had.
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
    try:
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        refuse_used(folder)
        try:
            claim = (folder / PROVENANCE).open("x", encoding="utf-8")
        except FileExistsError:
            refuse_used(folder)
            raise
        with claim:
            json.dump(about, claim, indent=2, ensure_ascii=False)
            claim.write("\n")
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        (folder / ".hydra" / "config.yaml").write_text(config, encoding="utf-8")
        (folder / ".hydra" / "overrides.yaml").write_text("\n".join(overrides or ["[]"]) + "\n", encoding="utf-8")
    except OSError as error:
        raise ShardlabError(f"run_dir={folder} can't be written: {error.strerror or error}") from error
    return name
