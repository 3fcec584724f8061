"""Which splits may be asked for: the mesh, the stages of a pipeline, and what the tensor axis can cut."""

import math
from dataclasses import replace

from shardlab.config.optimizers import MATRIX_WISE
from shardlab.config.schema import AXES, Config, NsmcConfig, StrategyConfig, Task, TrainerConfig
from shardlab.errors import ShardlabError

PRESETS = {
    "single": (),
    "ddp": ("replicate",),
    "pipeline": ("pipeline",),
    "pipeline_naive": ("pipeline",),
    "tensor": ("tensor",),
}
"""The axes that a packaged strategy may split; any other name, such as hybrid, takes every product."""

MICRO_BATCHES_PER_STAGE = 4
"""At least, of a pipeline that is not told how to cut: then the bubble is small (Huang et al. 2019, section 2.3)."""


def at_least(key: str, value: int | None, least: int) -> None:
    """Raise ShardlabError where a value is given and too small."""
    if value is not None and value < least:
        raise ShardlabError(f"{key}={value}: it must be at least {least}")


def check_ranks(strategy: StrategyConfig, ranks: int) -> int:
    """The number of ranks of the mesh; ShardlabError where axes, name and ranks don't fit together."""
    sizes = {axis: getattr(strategy, axis) for axis in AXES}
    for axis, size in sizes.items():
        at_least(f"strategy.{axis}", size, 1)
    if strategy.shard > 1:
        raise ShardlabError(f"strategy.shard={strategy.shard} is not available in this version; 1 is")
    product = math.prod(sizes.values())
    split = PRESETS.get(strategy.name, AXES)
    for axis, size in sizes.items():
        if size > 1 and axis not in split:
            other = "strategy=hybrid takes any product of axes"
            if strategy.name == "single":
                other = f"strategy={'ddp' if axis == 'replicate' else axis} with ranks={size} would do"
            raise ShardlabError(f"strategy={strategy.name} has strategy.{axis}=1, not {size}; {other}")
    if strategy.name == "pipeline_naive" and strategy.schedule.name != "naive":
        raise ShardlabError(
            f"strategy=pipeline_naive has strategy.schedule=naive, not {strategy.schedule.name}; "
            "strategy=pipeline takes every schedule"
        )
    if strategy.name == "single":
        return 1
    if product != ranks:
        axis = split[0] if len(split) == 1 else max(sizes, key=lambda axis: sizes[axis])
        raise ShardlabError(
            f"the axes of strategy={strategy.name} make {product} ranks, but ranks={ranks}; set ranks={product}"
            + (f" or strategy.{axis}={ranks}" if product == sizes[axis] else "")
        )
    return ranks


def is_classifier(config: Config) -> bool:
    """Whether the dataset asks for a classifier; else for a language model."""
    return isinstance(config.dataset, NsmcConfig) or getattr(config.dataset, "task", None) is Task.classifier


def check_split(config: Config) -> None:
    """Raise ShardlabError where the model can't be cut so: the pipeline's stages, and what the tensor axis cuts."""
    strategy, model = config.strategy, config.model
    stages = strategy.pipeline
    if stages > 1 and model.tie and not is_classifier(config):
        raise ShardlabError(
            f"model.tie=true needs embedding and head on one rank, and strategy.pipeline={stages} parts them; "
            "model.tie=false or strategy=tensor would run"
        )
    if stages > model.n_layers + 2:
        raise ShardlabError(
            f"strategy.pipeline={stages} has more stages than model.n_layers={model.n_layers} can fill; at most "
            f"{model.n_layers + 2} would do (embedding and head may stand alone)"
        )
    if stages > 1 and strategy.split is not None:
        _check_layers(strategy.split, stages, model.n_layers)
    for key in ("n_heads", "d_ff"):
        size = getattr(model, key)
        if size % strategy.tensor:
            fitting = [str(n) for n in range(1, model.n_heads + 1) if model.n_heads % n == 0 and model.d_ff % n == 0]
            would = " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)
            raise ShardlabError(f"strategy.tensor={strategy.tensor} does not divide model.{key}={size}; {would} would")
    if strategy.tensor > 1 and config.optimizer.name in MATRIX_WISE:
        raise ShardlabError(
            f"optimizer.name={config.optimizer.name} looks at whole matrices, and strategy.tensor={strategy.tensor} "
            "cuts them; an elementwise one (AdamW, SGD) or strategy=pipeline would run"
        )


def _check_layers(split: list[int], stages: int, n_layers: int) -> None:
    """strategy.split: the layers of each stage."""
    shown = f"strategy.split={split}".replace(" ", "")
    small, larger = divmod(n_layers, stages)
    sizes = [small + (stage < larger) for stage in range(stages)]
    if small == 0:  # only the ends may have none
        sizes = [int(larger + 1 == stages), *[1] * (stages - 2), 0]
    even = str(sizes).replace(" ", "")
    if len(split) != stages:
        raise ShardlabError(f"{shown} has a length of {len(split)}, and strategy.pipeline={stages}; {even} would do")
    if sum(split) != n_layers:
        raise ShardlabError(f"{shown} makes {sum(split)} layers, and model.n_layers={n_layers}; {even} would do")
    if min(split) < 0:
        raise ShardlabError(f"{shown}: a stage can't have fewer than 0 layers; {even} would do")
    if 0 in split[1:-1]:
        raise ShardlabError(
            f"{shown}: a stage between the ends needs a layer (the first and the last may have 0: they hold the "
            f"embedding and the head); {even} would do"
        )


def schedule_notes(config: Config, overrides: list[str]) -> list[str]:
    """What the user should know of a checked config: what is left unused, or replaced."""
    strategy, trainer = config.strategy, config.trainer
    if strategy.pipeline == 1:
        given = [key for key in ("schedule", "split") if any(o.startswith(f"strategy.{key}=") for o in overrides)]
        return [f"strategy.pipeline=1: strategy.{key} is left unused" for key in given]
    parts = trainer.micro_batches or -(-trainer.global_batch // (trainer.micro_batch or trainer.global_batch))
    of_a_copy = -(-parts // strategy.replicate)
    if strategy.schedule.name == "1f1b" and of_a_copy < strategy.pipeline:
        few = f"{of_a_copy} micro-batches are fewer than strategy.pipeline={strategy.pipeline} stages"
        return [f"{few}: gpipe takes the place of 1f1b"]
    return []


def settle_cut(trainer: TrainerConfig, strategy: StrategyConfig) -> TrainerConfig:
    """The trainer's config with the micro-batches that a pipeline needs, where the config leaves that open.

    It settles rows, not parts: a number of parts that doesn't divide the rows would pad most of them.
    """
    if strategy.pipeline == 1 or strategy.schedule.name == "naive" or trainer.micro_batch or trainer.micro_batches:
        return trainer
    rows_of_a_copy = trainer.global_batch // strategy.replicate
    return replace(trainer, micro_batch=max(1, rows_of_a_copy // (MICRO_BATCHES_PER_STAGE * strategy.pipeline)))
