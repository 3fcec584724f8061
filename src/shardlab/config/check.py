"""Ranges, and the rules across keys: everything that a type cannot say.

All of them live here, in strategies.py and in optimizers.py, and say what would be allowed. What `auto` and null
leave open is settled here too, so that the config that is logged is the config that ran. Nothing is started, and
torch is imported only to ask a machine that has GPUs how many, or to try an optimizer's values.
"""

import math
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardlab.config.compose import Composed, config_yaml
from shardlab.config.objectives import check_objective
from shardlab.config.optimizers import check_optimizer
from shardlab.config.schema import (
    Config,
    CosineConfig,
    Device,
    ModelConfig,
    NsmcConfig,
    Positions,
    Precision,
    RuntimeConfig,
    StepConfig,
    TextConfig,
    TrainerConfig,
)
from shardlab.config.strategies import (
    at_least,
    check_ranks,
    check_split,
    is_classifier,
    schedule_notes,
    settle_cut,
    settle_strategy,
)
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


@dataclass(frozen=True)
class Share:
    """What one run may use of the machine, or of all machines of a job that the command has joined.

    cores, gpus: how many
    ranks: the most that any run of this command uses; all of them must fit on their GPUs for `auto` to take GPUs
    """

    cores: int
    gpus: int
    ranks: int = 0


def whole_machine() -> Share:
    """The share of a run that is alone."""
    return Share(available_cores(), visible_gpus())


def settle(composed: Composed, share: Share | None = None, *, values: bool = True) -> tuple[Composed, list[str]]:
    """The composed config after `check`, and notes for the user: what was asked for and could not be taken.

    share: of the machine; by default all of it. values: see `check`. Raises ShardlabError.
    """
    share = share or whole_machine()
    asked, config = composed.config, check(composed.config, share, values=values)
    notes = []
    if config.ranks != asked.ranks and any(override.startswith("ranks=") for override in composed.overrides):
        notes.append(f"strategy=single runs on one rank; ranks={asked.ranks} is left unused")
    notes += schedule_notes(config, composed.overrides)
    if asked.runtime.device is Device.auto and config.runtime.device is Device.cpu and share.gpus > 0:
        needed = max(config.ranks, share.ranks)
        notes.append(f"runtime.device=auto: {share.gpus} GPUs are too few for {needed} ranks; taking the CPU")
    return replace(composed, config=config, yaml=config_yaml(config)), notes


def check(config: Config, share: Share | None = None, *, values: bool = True) -> Config:
    """The config with open values settled, after every rule has been looked at.

    Settled: ranks (1 under strategy=single), trainer.micro_batch and strategy.split of a pipeline, runtime.device (cpu
    or cuda), runtime.threads (the share's cores, evenly). share: of the machine; by default all of it
    values: let torch judge those of optimizer.kwargs, for which it must be imported

    Raises ShardlabError, one line with what would work.
    """
    at_least("ranks", config.ranks, 1)
    if not 0 <= config.seed <= LARGEST_SEED:
        raise ShardlabError(f"seed={config.seed}: a seed lies between 0 and {LARGEST_SEED}")
    if not config.run_dir.strip():
        raise ShardlabError("run_dir is empty; give a folder, or leave it away for runs/DATE/TIME")
    ranks = check_ranks(config.strategy, config.ranks)
    config = replace(config, strategy=settle_strategy(config.strategy))
    _check_model(config.model)
    check_split(config)
    check_dataset(config)
    _check_trainer(config.trainer)
    _check_shares(config)
    _positive("optimizer.lr", config.optimizer.lr)
    check_optimizer(config.optimizer, values=values)
    _check_scheduler(config)
    at_least("sweep.parallel", config.sweep.parallel, 1)
    check_objective(config.sweep.objective, is_classifier(config))
    if config.tracking.name not in ("mlflow", "none"):
        raise ShardlabError(f"tracking.name={config.tracking.name} is unknown; it is mlflow or none")
    runtime = _settle(config.runtime, ranks, share or whole_machine())
    _check_precision(config.precision.name, runtime.device)
    return replace(
        config,
        ranks=ranks,
        trainer=settle_cut(config.trainer, config.strategy),
        dataset=_settle_path(config.dataset),
        runtime=runtime,
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
    strategy, rows = config.strategy, config.trainer.global_batch
    if strategy.replicate * strategy.shard > rows:
        axis = "shard" if strategy.shard > strategy.replicate else "replicate"
        copies = f"strategy.{axis}={getattr(strategy, axis)}"
        if strategy.replicate > 1 and strategy.shard > 1:
            copies = f"strategy.replicate={strategy.replicate} times strategy.shard={strategy.shard}"
        raise ShardlabError(
            f"{copies} exceeds the {rows} rows of trainer.global_batch; every rank needs one, "
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


def _settle(runtime: RuntimeConfig, ranks: int, share: Share) -> RuntimeConfig:
    # More ranks or threads than that are a slip of the keyboard, and would take the machine down.
    crowd = max(64, 8 * max(available_cores(), share.cores))
    at_least("runtime.threads", runtime.threads, 1)
    _at_most("runtime.threads", runtime.threads, crowd)
    _at_most("ranks", ranks, crowd)
    _positive("runtime.timeout", runtime.timeout)
    if runtime.timeout > LONGEST_TIMEOUT:
        raise ShardlabError(f"runtime.timeout={runtime.timeout}: at most {LONGEST_TIMEOUT:.0f} seconds would do")
    device = runtime.device
    if device is not Device.cpu:
        if device is Device.cuda and share.gpus < ranks:
            raise ShardlabError(
                f"runtime.device=cuda needs a GPU for each of {ranks} ranks, and {share.gpus} can be used here; "
                "runtime.device=cpu would run"
            )
        enough = share.gpus >= max(ranks, share.ranks)
        device = Device.cuda if device is Device.cuda or enough else Device.cpu
    threads = runtime.threads or max(1, share.cores // ranks)
    return replace(runtime, device=device, threads=threads)


def _check_precision(precision: Precision, device: Device) -> None:
    """The device must be settled. The others run on every device, and with every optimizer: it sees fp32 alone."""
    if precision is Precision.tf32 and device is Device.cpu:
        raise ShardlabError(
            "precision=tf32 is a way of NVIDIA's GPUs to multiply, and this run is on the CPU; "
            "precision=fp32, or bf16 for less exact products, would run"
        )


def available_cores() -> int:
    """The cores that this process may use; containers and batch systems often grant fewer than there are."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """How many CUDA devices torch would see."""
    return len(gpu_names())


@cache
def gpu_names() -> tuple[str, ...]:
    """The CUDA devices that torch would see, as CUDA_VISIBLE_DEVICES names them; found out without importing it, which
    takes seconds.

    A build of torch without CUDA sees none; otherwise NVIDIA's device files count, as far as CUDA_VISIBLE_DEVICES
    shows them.
    """
    devices = sum(file.name[6:].isdigit() for file in DEVICES.glob("nvidia*"))
    if devices == 0 or not _torch_has_cuda():
        return ()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return tuple(str(number) for number in range(devices))
    names = [name.strip() for name in shown.split(",") if name.strip()]
    # CUDA itself stops at the first name that is none, such as -1.
    valid = [not name.lstrip("-").isdigit() or 0 <= int(name) < devices for name in names]
    return tuple(names[: valid.index(False)] if False in valid else names)


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, as its version.py says: `cuda: ... = '12.8'`, or None."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=\n]*= *['\"]", version, re.MULTILINE) is not None
