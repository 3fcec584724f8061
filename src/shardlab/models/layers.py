"""The modules that hold a Transformer's parameters: products with matrices, norms, embeddings.

Their parameters are named and shaped by the table, and live on the meta device until they are given values. Where the
tensor axis cuts a matrix, the collective that stands before or behind it is the module's own affair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.parallel.part import Part
from shardlab.parallel.sequence import crossing
from shardlab.parallel.table import ParameterTable
from shardlab.parallel.tensor import vocabulary_embedding
from shardlab.parallel.weight_gradients import WeightGradients, product


class _Parameters(nn.Module):
    """A module whose parameters are named and shaped by the table; on the meta device until materialised."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, table: ParameterTable, part: Part, name: str) -> None:
        super().__init__()
        self.axis = part.axis
        self.enter, self.leave = crossing(part)
        for leaf in ("weight", "bias"):
            if entry := table.entries.get(f"{name}.{leaf}"):
                self.register_parameter(leaf, nn.Parameter(torch.empty(part.shape(entry), device="meta")))


class Linear(_Parameters):
    """x @ weight.T + bias, with any number of dims of features on either side flattened to one.

    weight_gradients: who computes the product and its gradients, where they may come later or the weight may be away
    """

    weight_gradients: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., inputs]; returns [..., outputs]"""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: nn.Parameter | None) -> Tensor:
        """x @ weight.T, and a bias."""
        if self.weight_gradients is not None:
            return self.weight_gradients.product(x, self.weight, bias)
        return product(x, self.weight.reshape(-1, x.shape[-1]), None if bias is None else bias.flatten())


class RowLinear(Linear):
    """The same where the tensor axis cuts the inputs: each rank's product is a summand, and the bias enters once."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., inputs held]; returns [..., outputs], whole or a slice of the sequence: see Part.positions"""
        if self.axis.ranks == 1:
            return self.product(x, self.bias)
        return self.leave(self.product(x, None), self.axis) + self.bias


class LayerNorm(_Parameters):
    """Layer normalisation over the features, eps 1e-5 as in torch."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model]"""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Embedding(_Parameters):
    """A row of the weight for each index; the tensor axis cuts the weight by rows."""

    def forward(self, indices: Tensor) -> Tensor:
        """indices: int64 [rows, seq]; returns [rows, positions held, d_model]"""
        if self.axis.ranks == 1:
            return F.embedding(indices, self.weight)
        first = self.axis.rank * len(self.weight)
        return vocabulary_embedding(indices, self.weight, first, self.axis, self.leave)
