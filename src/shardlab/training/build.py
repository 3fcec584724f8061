"""Putting one rank's part together: model, optimizer and reducer from config, mesh and dataset."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardlab.config.schema import Config, ShardLevel
from shardlab.data.dataset import Batch, Dataset
from shardlab.errors import ShardlabError
from shardlab.models.cost import stage_layers, stages_per_rank
from shardlab.models.layers import Linear
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape, shape_of
from shardlab.models.transformer import Transformer
from shardlab.parallel.mesh import Connected
from shardlab.parallel.microbatch import MicroBatch, parts, share, take
from shardlab.parallel.orders import SPLIT, placement
from shardlab.parallel.part import Part
from shardlab.parallel.pipeline import Pipeline
from shardlab.parallel.replicate import GradientSum, Members
from shardlab.parallel.shard import Sharded
from shardlab.parallel.stages import stage_ranges
from shardlab.parallel.table import ParameterTable
from shardlab.parallel.units import units
from shardlab.parallel.values import held, materialise, uses
from shardlab.parallel.weight_gradients import WeightGradients
from shardlab.training.compiled import compile_layers
from shardlab.training.nonfinite import Skipped
from shardlab.training.precision import PARAMETERS, LossScale, loss_scale
from shardlab.training.pulse import beat


@dataclass(frozen=True)
class Training:
    """All that a rank trains with.

    models: the stages that this rank holds, by their numbers; one, number 0, where there is no pipeline
    part: what it holds of the model in all of them; held: their parameters, in the table's order
    pipeline: None where one stage is the whole model
    reducer: sums the gradients; its `trained` is what the optimizer updates
    loss_scale: of fp16, else None; skipped: how many of the last steps were
    """

    config: Config
    mesh: Connected
    device: torch.device
    dataset: Dataset
    shape: Shape
    table: ParameterTable
    part: Part
    models: dict[int, Transformer]
    pipeline: Pipeline | None
    held: Members
    optimizer: torch.optim.Optimizer
    reducer: GradientSum | Sharded
    loss_scale: LossScale | None
    skipped: Skipped

    @property
    def head(self) -> Transformer | None:
        """The model with the head, whose outputs are logits, if it is here."""
        return next((model for model in self.models.values() if model.head is not None), None)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """This rank's share of a step's micro-batches, on its device; at least one."""
        mesh, trainer = self.mesh.mesh, self.config.trainer
        pieces = parts(len(batch.inputs), trainer.micro_batch, trainer.micro_batches, mesh.data_ranks)
        width = max(map(len, pieces))
        mine = share(pieces, self.mesh.data_rank, mesh.data_ranks)
        rows = (take(number, pieces[number], width, batch.inputs, batch.targets, batch.lengths) for number in mine)
        return [micro_batch.to(self.device) for micro_batch in rows]


def build(config: Config, mesh: Connected, device: torch.device, dataset: Dataset) -> Training:
    """Raises ShardlabError where torch refuses the optimizer's arguments."""
    strategy = config.strategy
    shape = shape_of(config.model, dataset.vocab_size, dataset.n_classes, dataset.max_len)
    table = parameter_table(shape, strategy.sequence_parallel)
    stages = stage_ranges(stage_layers(config, shape, table))
    mine = placement(strategy.schedule.name, strategy.pipeline, stages_per_rank(config))[mesh.place["pipeline"]]
    of = partial(Part, axis=mesh.axes["tensor"], sequence_parallel=strategy.sequence_parallel)
    models = {stage: Transformer(shape, table, of(stages[stage])) for stage in mine}
    part = of(tuple(place for stage in mine for place in stages[stage]))
    reducer, parameters = build_parameters(config, mesh, device, table, part, [*models.values()])
    weight_gradients = WeightGradients(reducer.arrived)
    # Under level 1 and 2 the plain product would do, and it is the one that can be compiled.
    frees = strategy.shard_level is ShardLevel.parameters or not config.runtime.compile
    if strategy.schedule.name in SPLIT or (strategy.shard > 1 and frees):
        for module in (module for model in models.values() for module in model.modules()):
            if isinstance(module, Linear):
                module.weight_gradients = weight_gradients
    if config.runtime.compile:
        compile_layers(models.values(), weight_gradients, device)
    return Training(
        config=config,
        mesh=mesh,
        device=device,
        dataset=dataset,
        shape=shape,
        table=table,
        part=part,
        models=models,
        pipeline=build_pipeline(config, mesh, device, part, weight_gradients),
        held=parameters,
        optimizer=build_optimizer(config, [parameter for _, parameter in reducer.trained]),
        reducer=reducer,
        loss_scale=loss_scale(config.precision.name),
        skipped=Skipped(),
    )


def build_parameters(
    config: Config,
    mesh: Connected,
    device: torch.device,
    table: ParameterTable,
    part: Part,
    models: list[nn.Module],
) -> tuple[GradientSum | Sharded, Members]:
    """Give the models their first values; returns who sums their gradients, and their parameters."""
    dtype = PARAMETERS[config.precision.name]
    if config.strategy.shard == 1:

        def put(entry: object, value: Tensor) -> Tensor:
            return value.to(device=device, dtype=dtype)

        materialise(models, table, part, config.seed, put, after_each=beat)
        parameters = held(models, table)
        return GradientSum(parameters, uses(models), mesh.axes["replicate"]), parameters
    axes = mesh.axes["shard"], mesh.axes["replicate"]
    sharded = Sharded(
        units(table, part, mesh.mesh.shard), part, config.strategy.shard_level, *axes, dtype=dtype, device=device
    )
    materialise(models, table, part, config.seed, sharded.put, after_each=beat)
    parameters = held(models, table)
    sharded.attach(parameters, uses(models, apart=not config.runtime.compile))
    return sharded, parameters


def build_pipeline(
    config: Config, mesh: Connected, device: torch.device, part: Part, weight_gradients: WeightGradients
) -> Pipeline | None:
    """This rank's end of the pipeline, if there is one."""
    strategy, d_model = config.strategy, config.model.d_model
    if strategy.pipeline == 1:
        return None

    def shape(micro_batch: MicroBatch) -> tuple[int, ...]:
        rows, seq = micro_batch.inputs.shape
        return rows, part.positions(seq).size, d_model

    return Pipeline(
        mesh.axes["pipeline"],
        strategy.schedule.name,
        stages_per_rank(config),
        shape,
        PARAMETERS[config.precision.name],
        device,
        weight_gradients,
    )


def build_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The class of torch.optim that the config names (config.check knows which there are)."""
    optimizer = config.optimizer
    try:
        made = getattr(torch.optim, optimizer.name)(parameters, lr=optimizer.lr, **optimizer.kwargs)
    except (TypeError, ValueError) as error:
        raise ShardlabError(f"optimizer.name={optimizer.name} refuses its arguments: {error}") from error
    assert isinstance(made, torch.optim.Optimizer)
    return made
