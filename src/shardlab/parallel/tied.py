"""A tied weight at both ends of a pipeline: the embedding on the first stage, the same values in the head on the last.

Each end has a copy, and after its backward passes the gradient of its own use. The two are exchanged and added on both
sides before the norm is taken: a + b and b + a are the same bits, so two equal copies stay equal through any
elementwise optimizer. The norm counts the owner's alone (clipping.py). Where one rank has both ends, the two models
share one parameter, and autograd adds.

Source: Press and Wolf 2017, "Using the Output Embedding to Improve Language Models", for the tie itself.
"""

from __future__ import annotations

import torch

from shardlab.parallel.axis import Axis
from shardlab.parallel.part import Part
from shardlab.parallel.replicate import Members
from shardlab.parallel.table import ParameterTable


def sum_tied(trained: Members, table: ParameterTable, part: Part, pipeline: Axis) -> None:
    """Add the other end's gradients to those of tied weights, where both ends are on different ranks.

    trained: what this rank updates; its gradients must be complete but for this
    """
    ends = {entry.tied_to: entry.layer for entry in table if entry.tied_to is not None}
    for entry, parameter in trained:
        if entry.name not in ends or {entry.layer, ends[entry.name]} <= set(part.layers):
            continue
        peer = pipeline.ranks - 1 if entry.layer in part.layers else 0
        assert parameter.grad is not None
        other = torch.empty_like(parameter.grad)
        for work in pipeline.exchange([(parameter.grad, peer)], [(other, peer)]):
            work.wait()
        parameter.grad += other
