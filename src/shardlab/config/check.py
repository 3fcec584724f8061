"""Ranges, and the rules across keys: everything that a type cannot say.

All of them live here, in strategies.py and in optimizers.py, and say what would be allowed. What `auto` and null
leave open is settled here too, so that the config that is logged is the config that ran. Nothing is started, and
torch is imported only to ask a machine that has GPUs how many, or to try an optimizer's values.
"""

import math
import os
import re
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardlab.config.compose import Composed, config_yaml
from shardlab.config.objectives import check_objective
from shardlab.config.optimizers import check_optimizer
from shardlab.config.room import Room, check_room
from shardlab.config.schema import (
    Config,
    CosineConfig,
    Device,
    ModelConfig,
    NsmcConfig,
    Positions,
    RuntimeConfig,
    StepConfig,
    TextConfig,
    TrainerConfig,
)
from shardlab.config.strategies import at_least, check_ranks, check_split, is_classifier, schedule_notes, settle_cut
from shardlab.errors import ShardlabError

LARGEST_SEED = 2**32 - 1
"""More seeds than anybody needs; the order of the rows takes them as one 32-bit word."""

DEVICES = Path("/dev")
"""Where NVIDIA's driver shows a file for each GPU."""

LARGEST_SIZE = 2**20
"""Features, heads and positions: far beyond any machine, yet within what an array's size can say."""

MOST_LAYERS = 1024
"""Ten times as many as the deepest models have."""

MOST_TOKENS, MOST_STEPS = 10**8, 10**12
"""Of the synthetic source, which is made in memory; of a run."""

LONGEST_TIMEOUT = 1e7
"""Seconds, a third of a year: torch keeps a timeout in milliseconds, and a larger one overflows."""


def settle(
    composed: Composed, *, largest_ranks: int | None = None, room: Room | None = None
) -> tuple[Composed, list[str]]:
    """The composed config after `check`, and notes for the user: what was asked for and could not be taken.

    Raises ShardlabError.
    """
    asked, config = composed.config, check(composed.config, largest_ranks=largest_ranks, room=room)
    notes = []
    if config.ranks != asked.ranks and any(override.startswith("ranks=") for override in composed.overrides):
        notes.append(f"strategy=single runs on one rank; ranks={asked.ranks} is left unused")
    notes += schedule_notes(config, composed.overrides)
    if asked.runtime.device is Device.auto and config.runtime.device is Device.cpu and visible_gpus() > 0:
        if room is not None:
            return replace(composed, config=config, yaml=config_yaml(config)), [
                *notes,
                "runtime.device=auto: not every rank of this job has a GPU of its own; taking the CPU",
            ]
        needed = max(config.ranks, largest_ranks or 0)
        notes.append(f"runtime.device=auto: {visible_gpus()} GPUs are too few for {needed} ranks; taking the CPU")
    return replace(composed, config=config, yaml=config_yaml(config)), notes


def check(config: Config, *, largest_ranks: int | None = None, room: Room | None = None) -> Config:
    """The config with open values settled, after every rule has been looked at.

    Settled: ranks (1 under strategy=single), trainer.micro_batch and strategy.split of a pipeline, runtime.device (cpu
    or cuda), runtime.threads (the cores shared evenly).
    largest_ranks: the most ranks that any job of this command uses, all of which must fit on the GPUs for `auto` to
    take them; by default this config's. room: what the job that this command has joined offers, if it has.
    Raises ShardlabError, one line with what would work.
    """
    at_least("ranks", config.ranks, 1)
    if not 0 <= config.seed <= LARGEST_SEED:
        raise ShardlabError(f"seed={config.seed}: a seed lies between 0 and {LARGEST_SEED}")
    if not config.run_dir.strip():
        raise ShardlabError("run_dir is empty; give a folder, or leave it away for runs/DATE/TIME")
    ranks = check_ranks(config.strategy, config.ranks)
    if room is not None:
        check_room(config, ranks, room)
    _check_model(config.model)
    check_split(config)
    check_dataset(config)
    _check_trainer(config.trainer)
    _check_shares(config)
    _positive("optimizer.lr", config.optimizer.lr)
    check_optimizer(config.optimizer)
    _check_scheduler(config)
    at_least("sweep.parallel", config.sweep.parallel, 1)
    check_objective(config.sweep.objective, is_classifier(config))
    if config.tracking.name not in ("mlflow", "none"):
        raise ShardlabError(f"tracking.name={config.tracking.name} is unknown; it is mlflow or none")
    return replace(
        config,
        ranks=ranks,
        strategy=config.strategy if config.strategy.pipeline > 1 else replace(config.strategy, split=None),
        trainer=settle_cut(config.trainer, config.strategy),
        dataset=_settle_path(config.dataset),
        runtime=_settle(config.runtime, ranks, max(ranks, largest_ranks or 0), room),
    )


def _at_most(key: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise ShardlabError(f"{key}={value}: at most {most} is taken")


def _positive(key: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ShardlabError(f"{key}={value}: it must be a number above 0")


def _check_model(model: ModelConfig) -> None:
    for key in ("n_layers", "d_model", "n_heads", "d_ff"):
        at_least(f"model.{key}", getattr(model, key), 1)
        _at_most(f"model.{key}", getattr(model, key), MOST_LAYERS if key == "n_layers" else LARGEST_SIZE)
    if model.d_model % model.n_heads:
        fitting = [n for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        close = sorted(sorted(fitting, key=lambda n: abs(n - model.n_heads))[:4])
        raise ShardlabError(
            f"model.n_heads={model.n_heads} does not divide model.d_model={model.d_model}; "
            f"{', '.join(str(n) for n in close[:-1]) or close[0]} or {close[-1]} would"
        )
    if not 0 <= model.dropout < 1:
        raise ShardlabError(f"model.dropout={model.dropout}: it must be at least 0 and below 1")
    if model.positions is Positions.sinusoidal and model.d_model % 2:
        raise ShardlabError(
            f"model.d_model={model.d_model} is odd, and sinusoidal positions come in pairs; "
            "take an even one or model.positions=learned"
        )


def check_dataset(config: Config) -> None:
    """The rules of the dataset alone; raises ShardlabError."""
    dataset = config.dataset
    for key in ("seq_len", "max_length", "validation_rows", "train_tokens", "train_rows"):
        at_least(f"dataset.{key}", getattr(dataset, key, None), 1)
        _at_most(f"dataset.{key}", getattr(dataset, key, None), MOST_TOKENS if "train" in key else LARGEST_SIZE)
    if isinstance(dataset, NsmcConfig) and dataset.max_length < 3:
        raise ShardlabError(f"dataset.max_length={dataset.max_length}: [CLS], one piece and [SEP] need 3")
    path = getattr(_settle_path(dataset), "path", None)
    if path is not None and not Path(path).exists():
        raise ShardlabError(f"dataset.path={dataset.path}: no such file or folder")


def _settle_path(dataset: Any) -> Any:
    """The dataset's config with its path absolute, so that the logged one means the same from any folder."""
    if isinstance(dataset, TextConfig | NsmcConfig) and dataset.path is not None:
        try:
            return replace(dataset, path=str(Path(dataset.path).expanduser().absolute()))
        except RuntimeError:
            raise ShardlabError(f"dataset.path={dataset.path}: there is no such user") from None
    return dataset


def _check_trainer(trainer: TrainerConfig) -> None:
    for key in (
        "steps",
        "epochs",
        "epoch_steps",
        "eval_batches",
        "global_batch",
        "micro_batch",
        "micro_batches",
        "eval_every",
    ):
        at_least(f"trainer.{key}", getattr(trainer, key), 1)
        _at_most(f"trainer.{key}", getattr(trainer, key), MOST_STEPS)
    _positive("trainer.clip", trainer.clip)
    if trainer.micro_batch is not None and trainer.micro_batches is not None:
        raise ShardlabError("trainer.micro_batch and trainer.micro_batches cut the same batch; give one of them")
    for key in ("micro_batch", "micro_batches"):
        value = getattr(trainer, key)
        if value is not None and value > trainer.global_batch:
            raise ShardlabError(
                f"trainer.{key}={value} exceeds the {trainer.global_batch} rows of trainer.global_batch; "
                f"1 to {trainer.global_batch} would do"
            )


def _check_shares(config: Config) -> None:
    """Every data-parallel rank must get a row."""
    copies, rows = config.strategy.replicate, config.trainer.global_batch
    if copies > rows:
        raise ShardlabError(
            f"strategy.replicate={copies} exceeds the {rows} rows of trainer.global_batch; every rank needs one, "
            f"so at most {rows} would do"
        )


def _check_scheduler(config: Config) -> None:
    scheduler = config.scheduler
    if isinstance(scheduler, StepConfig):
        if not 0 < scheduler.gamma <= 1:
            raise ShardlabError(f"scheduler.gamma={scheduler.gamma}: it must be above 0 and at most 1")
        at_least("scheduler.every_epochs", scheduler.every_epochs, 1)
    if isinstance(scheduler, CosineConfig):
        at_least("scheduler.warmup_steps", scheduler.warmup_steps, 0)
        if not 0 <= scheduler.final_ratio <= 1:
            raise ShardlabError(f"scheduler.final_ratio={scheduler.final_ratio}: it must lie between 0 and 1")


def _settle(runtime: RuntimeConfig, ranks: int, largest_ranks: int, room: Room | None) -> RuntimeConfig:
    # More ranks or threads than that are a slip of the keyboard, and would take the machine down.
    crowd = max(64, 8 * available_cores())
    at_least("runtime.threads", runtime.threads, 1)
    _at_most("runtime.threads", runtime.threads, crowd)
    _at_most("ranks", ranks, crowd if room is None else room.ranks)
    _positive("runtime.timeout", runtime.timeout)
    if runtime.timeout > LONGEST_TIMEOUT:
        raise ShardlabError(f"runtime.timeout={runtime.timeout}: at most {LONGEST_TIMEOUT:.0f} seconds would do")
    device = runtime.device
    if device is not Device.cpu:
        found = visible_gpus() if room is None else ranks * room.gpus
        if device is Device.cuda and found < ranks and room is not None:
            raise ShardlabError(
                "runtime.device=cuda needs a GPU for each rank of this job on its own host, and some have none; "
                "runtime.device=cpu would run"
            )
        if device is Device.cuda and found < ranks:
            raise ShardlabError(
                f"runtime.device=cuda needs a GPU for each of {ranks} ranks, and {found} can be used here; "
                "runtime.device=cpu would run"
            )
        needed = largest_ranks if room is None else ranks  # of a sweep's jobs, those with other ranks are refused
        device = Device.cuda if device is Device.cuda or found >= needed else Device.cpu
    threads = runtime.threads or (max(1, available_cores() // ranks) if room is None else room.threads)
    return replace(runtime, device=device, threads=threads)


def available_cores() -> int:
    """The cores that this process may use; containers and batch systems often grant fewer than there are."""
    return len(os.sched_getaffinity(0))


@cache
def visible_gpus() -> int:
    """The CUDA devices that torch would see, found out without importing it: that takes seconds.

    A build of torch without CUDA sees none; otherwise NVIDIA's device files count, as far as CUDA_VISIBLE_DEVICES
    shows them.
    """
    devices = sum(file.name[6:].isdigit() for file in DEVICES.glob("nvidia*"))
    if devices == 0 or not _torch_has_cuda():
        return 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return devices
    names = [name.strip() for name in shown.split(",")]
    # CUDA itself stops at the first name that is none, such as -1.
    valid = [not name.lstrip("-").isdigit() or 0 <= int(name) < devices for name in names if name]
    return valid.index(False) if False in valid else len(valid)


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, as its version.py says: `cuda: ... = '12.8'`, or None."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=\n]*= *['\"]", version, re.MULTILINE) is not None
