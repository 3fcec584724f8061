"""Which splits may be asked for: the mesh, the stages of a pipeline, and what the tensor axis can cut."""

import math
from dataclasses import replace

from shardlab.config.optimizers import MATRIX_WISE
from shardlab.config.schema import (
    AXES,
    Config,
    NsmcConfig,
    Reduce,
    Schedule,
    ShardLevel,
    StrategyConfig,
    Task,
    TrainerConfig,
)
from shardlab.errors import ShardlabError
from shardlab.parallel.orders import STAGES_PER_RANK, runnable, stages_per_rank

PRESETS = {
    "single": (),
    "ddp": ("replicate",),
    "zero1": ("shard",),
    "zero2": ("shard",),
    "zero3": ("shard",),
    "pipeline": ("pipeline",),
    "pipeline_naive": ("pipeline",),
    "tensor": ("tensor",),
}
"""The axes that a packaged strategy may split; any other name, such as hybrid, takes every product."""

ALONE = {"replicate": "ddp", "shard": "zero3"}
"""The preset of an axis alone, where it has another name."""

LEVELS = {"zero1": ShardLevel.optimizer, "zero2": ShardLevel.gradients, "zero3": ShardLevel.parameters}
"""What the packaged ZeRO strategies shard."""

NEEDS = {
    ("pipeline",): ("schedule", "split", "stages_per_rank"),
    ("tensor",): ("sequence_parallel",),
    ("shard",): ("shard_level",),
    ("replicate", "shard"): ("reduce",),
}
"""Keys of a strategy that only some axes use."""

MICRO_BATCHES_PER_RANK = 4
"""At least, of a pipeline that is not told how to cut: then the bubble is small (Huang et al. 2019,
section 2.3)."""


def at_least(key: str, value: int | None, least: int) -> None:
    """Raise ShardlabError where a value is given and too small."""
    if value is not None and value < least:
        raise ShardlabError(f"{key}={value}: it must be at least {least}")


def check_ranks(strategy: StrategyConfig, ranks: int) -> int:
    """The number of ranks of the mesh; ShardlabError where axes, name and ranks don't fit together."""
    sizes = {axis: getattr(strategy, axis) for axis in AXES}
    for axis, size in sizes.items():
        at_least(f"strategy.{axis}", size, 1)
    product = math.prod(sizes.values())
    split = PRESETS.get(strategy.name, AXES)
    for axis, size in sizes.items():
        if size > 1 and axis not in split:
            other = "strategy=hybrid takes any product of axes"
            if strategy.name == "single":
                other = f"strategy={ALONE.get(axis, axis)} with ranks={size} would do"
            raise ShardlabError(f"strategy={strategy.name} has strategy.{axis}=1, not {size}; {other}")
    if strategy.name == "pipeline_naive" and strategy.schedule.name != "naive":
        raise ShardlabError(
            f"strategy=pipeline_naive has strategy.schedule=naive, not {strategy.schedule.name}; "
            "strategy=pipeline takes every schedule"
        )
    level = LEVELS.get(strategy.name)
    if level not in (None, strategy.shard_level):
        other = next(name for name in LEVELS if LEVELS[name] is strategy.shard_level)
        raise ShardlabError(
            f"strategy={strategy.name} has strategy.shard_level={level.name}, not {strategy.shard_level.name}; "
            f"strategy={other} has that"
        )
    if strategy.name == "single":
        return 1
    if product != ranks:
        axis = split[0] if len(split) == 1 else max(sizes, key=lambda axis: sizes[axis])
        made = f"{product} rank{'s' * (product > 1)}"
        raise ShardlabError(
            f"the axes of strategy={strategy.name} make {made}, but ranks={ranks}; set ranks={product}"
            + (f" or strategy.{axis}={ranks}" if product == sizes[axis] else "")
        )
    return ranks


def is_classifier(config: Config) -> bool:
    """Whether the dataset asks for a classifier; else for a language model."""
    return isinstance(config.dataset, NsmcConfig) or getattr(config.dataset, "task", None) is Task.classifier


def settle_strategy(strategy: StrategyConfig) -> StrategyConfig:
    """The strategy with the number of stages that a rank of a pipeline holds; what only an axis of one rank would use
    is as if it had not been named (but for the level of ZeRO, which belongs to a preset's name).

    Raises ShardlabError where the schedule is made for another number of stages.
    """
    at_least("strategy.stages_per_rank", strategy.stages_per_rank, 1)
    if strategy.tensor == 1:
        strategy = replace(strategy, sequence_parallel=False)
    if strategy.replicate * strategy.shard == 1:
        strategy = replace(strategy, reduce=Reduce.backend)
    if strategy.pipeline == 1:
        return replace(strategy, split=None, schedule=Schedule["1f1b"], stages_per_rank=1)
    wanted = strategy.stages_per_rank
    settled = stages_per_rank(strategy.schedule.name, wanted or 2)
    if wanted not in (None, settled):
        other = "interleaved_1f1b takes any number"
        raise ShardlabError(
            f"strategy.schedule={strategy.schedule.name} has {settled} stage{'s' * (settled > 1)} a rank, not "
            f"strategy.stages_per_rank={wanted}; strategy.schedule={other}"
        )
    return replace(strategy, stages_per_rank=settled)


def check_split(config: Config) -> None:
    """Raise ShardlabError where the model can't be cut so: the pipeline's stages, and what the tensor axis cuts.

    The strategy's stages must be settled.
    """
    strategy, model = config.strategy, config.model
    per_rank = strategy.stages_per_rank or 1
    stages = strategy.pipeline * per_rank
    if stages > model.n_layers + 2:
        shown, most = f"strategy.pipeline={strategy.pipeline}", model.n_layers + 2
        would = f"at most {most} would do (embedding and head may stand alone)"
        if per_rank > 1:
            shown = f"{shown} with {per_rank} stages a rank"
            fewer = STAGES_PER_RANK.get(strategy.schedule.name) is None and most // strategy.pipeline
            way = f"strategy.stages_per_rank={fewer}" if fewer else "strategy.schedule=1f1b with one a rank"
            would = f"{most} stages at most, so {way} would do"
        raise ShardlabError(f"{shown} has more stages than model.n_layers={model.n_layers} can fill; {would}")
    if stages > 1 and strategy.split is not None:
        _check_layers(strategy.split, stages, model.n_layers)
    for key in ("n_heads", "d_ff"):
        size = getattr(model, key)
        if size % strategy.tensor:
            fitting = [str(n) for n in range(1, model.n_heads + 1) if model.n_heads % n == 0 and model.d_ff % n == 0]
            would = " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)
            raise ShardlabError(f"strategy.tensor={strategy.tensor} does not divide model.{key}={size}; {would} would")
    cutting = next((axis for axis in ("tensor", "shard") if getattr(strategy, axis) > 1), None)
    if cutting is not None and config.optimizer.name in MATRIX_WISE:
        raise ShardlabError(
            f"optimizer.name={config.optimizer.name} looks at whole matrices, and "
            f"strategy.{cutting}={getattr(strategy, cutting)} cuts them; an elementwise one (AdamW, SGD) or "
            "strategy=pipeline would run"
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
        raise ShardlabError(f"{shown} has a length of {len(split)}, and there are {stages} stages; {even} would do")
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
    notes = []
    for axes, keys in NEEDS.items():
        given = [key for key in keys if any(_asks(o, key) for o in overrides)]
        if all(getattr(strategy, axis) == 1 for axis in axes):
            shown = " and ".join(f"strategy.{axis}=1" for axis in axes)
            notes += [f"{shown}: strategy.{key} is left unused" for key in given]
    if strategy.pipeline == 1:
        return notes
    parts = trainer.micro_batches or -(-trainer.global_batch // (trainer.micro_batch or trainer.global_batch))
    of_a_copy = -(-parts // (strategy.replicate * strategy.shard))
    schedule, per_rank = strategy.schedule.name, strategy.stages_per_rank or 1
    runs = runnable(schedule, strategy.pipeline, per_rank, of_a_copy)
    if runs != schedule:
        number = f"{of_a_copy} micro-batch{'es' * (of_a_copy > 1)} a copy"
        notes.append(f"{number} on {strategy.pipeline * per_rank} stages: {runs} takes the place of {schedule}")
    return notes


def _asks(override: str, key: str) -> bool:
    """Whether an override gives a strategy's key another value than its default."""
    given, _, value = override.lstrip("+").partition("=")
    default = getattr(StrategyConfig(), key)
    usual = {None: "null", True: "true", False: "false"}.get(default, getattr(default, "name", default))
    return given == f"strategy.{key}" and value.strip("\"'") != usual


def settle_cut(trainer: TrainerConfig, strategy: StrategyConfig) -> TrainerConfig:
    """The trainer's config with the micro-batches that a pipeline needs, where the config leaves that open.

    It settles rows, not parts: a number of parts that doesn't divide the rows would pad most of them.
    """
    if strategy.pipeline == 1 or strategy.schedule.name == "naive" or trainer.micro_batch or trainer.micro_batches:
        return trainer
    rows_of_a_copy = trainer.global_batch // (strategy.replicate * strategy.shard)
    return replace(trainer, micro_batch=max(1, rows_of_a_copy // (MICRO_BATCHES_PER_RANK * strategy.pipeline)))
