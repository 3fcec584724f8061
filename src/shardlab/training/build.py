"""Putting one rank's part together: model, optimizer and reducer from config, mesh and dataset."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardlab.config.schema import Config, Precision
from shardlab.data.dataset import Batch, Dataset
from shardlab.errors import ShardlabError
from shardlab.models.cost import place_costs
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape, shape_of
from shardlab.models.transformer import Transformer
from shardlab.parallel.mesh import Connected
from shardlab.parallel.microbatch import MicroBatch, parts, share, take
from shardlab.parallel.part import Part
from shardlab.parallel.pipeline import Pipeline
from shardlab.parallel.replicate import GradientSum
from shardlab.parallel.stages import cut, stage_ranges
from shardlab.parallel.table import Entry, ParameterTable, held, materialise
from shardlab.training.pulse import beat

DTYPES = {Precision.fp32: torch.float32, Precision.fp64: torch.float64}


@dataclass(frozen=True)
class Training:
    """All that a rank trains with.

    part: what this rank holds of the model; held: its parameters, in the table's order
    pipeline: None where one stage is the whole model
    """

    config: Config
    mesh: Connected
    device: torch.device
    dataset: Dataset
    shape: Shape
    table: ParameterTable
    part: Part
    model: Transformer
    pipeline: Pipeline | None
    held: list[tuple[Entry, nn.Parameter]]
    optimizer: torch.optim.Optimizer
    gradient_sum: GradientSum

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
    shape = shape_of(config.model, dataset.vocab_size, dataset.n_classes, dataset.max_len)
    table = parameter_table(shape)
    layers = stage_ranges(stage_layers(config, shape, table))[mesh.place["pipeline"]]
    part = Part(layers, mesh.tensor)
    model = Transformer(shape, table, part)
    dtype = DTYPES[config.precision.name]
    materialise(model, table, part, config.seed, dtype, device, after_each=beat)
    parameters = held(model, table)
    return Training(
        config=config,
        mesh=mesh,
        device=device,
        dataset=dataset,
        shape=shape,
        table=table,
        part=part,
        model=model,
        pipeline=build_pipeline(config, mesh, dtype, device),
        held=parameters,
        optimizer=build_optimizer(config, [parameter for _, parameter in parameters]),
        gradient_sum=GradientSum(parameters, mesh.groups["replicate"]),
    )


def stage_layers(config: Config, shape: Shape, table: ParameterTable) -> list[int]:
    """How many layers each stage has: as the config says, or by their estimated cost."""
    return config.strategy.split or cut(place_costs(shape, table), config.strategy.pipeline)


def build_pipeline(config: Config, mesh: Connected, dtype: torch.dtype, device: torch.device) -> Pipeline | None:
    """This rank's end of the pipeline, if there is one."""
    group, schedule = mesh.groups["pipeline"], config.strategy.schedule.name
    if group is None:
        return None
    stage, stages = mesh.place["pipeline"], mesh.mesh.pipeline
    return Pipeline(stage, stages, group, schedule, config.model.d_model, dtype, device)


def build_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The class of torch.optim that the config names (config.check knows which there are)."""
    optimizer = config.optimizer
    try:
        made = getattr(torch.optim, optimizer.name)(parameters, lr=optimizer.lr, **optimizer.kwargs)
    except (TypeError, ValueError) as error:
        raise ShardlabError(f"optimizer.name={optimizer.name} refuses its arguments: {error}") from error
    assert isinstance(made, torch.optim.Optimizer)
    return made
