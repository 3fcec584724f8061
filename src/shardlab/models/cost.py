"""What each place of the model costs, counted from the shape alone, and the pipeline's stages that follow from it."""

from __future__ import annotations

from shardlab.config.schema import Config
from shardlab.models.shape import Shape
from shardlab.parallel.stages import Cost, cut
from shardlab.parallel.table import ParameterTable


def place_costs(shape: Shape, table: ParameterTable) -> list[Cost]:
    """Of the embedding, each layer, and norm and head together.

    Time is floating-point operations of a token's forward pass: two for each weight of a matrix, and 4 * max_len *
    d_model for the two attention products. (Backward takes twice as much of each, which changes no proportion.) A
    classifier's head reads one position of max_len. The embedding multiplies nothing: it scales and adds.
    """
    elements = [0] * (shape.n_layers + 2)
    for entry in table:  # the copy of a tied weight too: each end of a pipeline has one
        elements[entry.layer + 1] += entry.elements
    d = shape.d_model
    layer = 2 * (4 * d * d + 2 * d * shape.d_ff) + 4 * shape.max_len * d
    head = 2 * shape.outputs * d / (1 if shape.causal else shape.max_len)
    times = [2 * d, *[layer] * shape.n_layers, head]
    return [Cost(time, count) for time, count in zip(times, elements, strict=True)]


def stages_per_rank(config: Config) -> int:
    """How many stages each rank of a pipeline holds; config.check has settled it."""
    return config.strategy.stages_per_rank or 1


def stage_layers(config: Config, shape: Shape, table: ParameterTable) -> list[int]:
    """How many layers each stage has: as the config says, or by their estimated cost."""
    return config.strategy.split or cut(place_costs(shape, table), config.strategy.pipeline * stages_per_rank(config))
