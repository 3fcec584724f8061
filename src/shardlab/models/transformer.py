"""One Transformer for both tasks: a causal language model, or a classifier that reads the first token.

Numerically it is a stack of torch.nn.TransformerEncoderLayer between a scaled embedding and a linear head, forward
and backward, written out so that it can be split: every parameter comes from the table, attention's heads are a dim
of their own, and dropout takes the step's masks instead of a generator. A rank builds its part of it: some of the
layers, and of each matrix the slice that the tensor axis leaves it (`parallel/tensor.py` says what travels).

Attention is written out too, not F.scaled_dot_product_attention: its probabilities are dropped by our masks, and
its fused backward sums in no fixed order on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.config.schema import Activation, Norm, Positions
from shardlab.models.layers import Embedding, LayerNorm, Linear, RowLinear
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import Shape
from shardlab.parallel.dropout import Masks
from shardlab.parallel.loss import summed_cross_entropy, widened
from shardlab.parallel.part import Part, Span, span
from shardlab.parallel.sequence import crossing, first_tokens
from shardlab.parallel.table import ParameterTable
from shardlab.parallel.tensor import vocabulary_cross_entropy

Run = Callable[[int, Callable[[Tensor], Tensor], Tensor], Tensor]
"""Computes a place of the model (-1, the embedding, to n_layers, norm and head) by a function of its input. Whoever
must do something around a place's computation, such as gather its parameters, or keep nothing of it, does it there."""


def plainly(place: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a place, and nothing else."""
    return function(x)


def whole(shape: Shape) -> Part:
    """The part that holds everything."""
    return Part(range(-1, shape.n_layers + 1))


BLOCK_SITES = ("attention", "attention_out", "feed_forward", "feed_forward_out")
"""Where a block drops: attention probabilities, attention's output, the hidden features, the block's output."""


def dropout_sites(shape: Shape) -> list[str]:
    """Every site of the whole model; a site's index here is its number, whatever part of the model a rank holds."""
    return ["embedding", *(f"layers.{layer}.{site}" for layer in range(shape.n_layers) for site in BLOCK_SITES)]


def sinusoid(length: int, d_model: int) -> Tensor:
    """Fixed position vectors: fp64 [length, d_model], sines at even features and cosines at odd ones.

    Source: Vaswani et al. 2017, section 3.5.
    """
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angle = position * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def attention_mask(lengths: Tensor, seq: int, causal: bool) -> Tensor:
    """Which keys a query may not see: bool [rows, 1, queries or 1, keys], True where hidden.

    lengths: int64 [rows]; keys from there on are padding
    """
    places = torch.arange(seq, device=lengths.device)
    hidden = (places >= lengths[:, None])[:, None, None, :]
    return hidden | (places > places[:, None]) if causal else hidden


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, table: ParameterTable, part: Part, name: str) -> None:
        super().__init__()
        self.qkv = Linear(table, part, f"{name}.qkv")
        self.out = RowLinear(table, part, f"{name}.out")
        self.axis = part.axis
        self.enter, _ = crossing(part)

    def forward(self, x: Tensor, hidden: Tensor, masks: Masks | None, site: int) -> Tensor:
        """x: [rows, positions held, d_model]; hidden: see `attention_mask`; site: of the probabilities' dropout"""
        x = self.enter(x, self.axis)
        rows, seq, _ = x.shape
        _, n_heads, d_head, _ = self.qkv.weight.shape  # the heads that are here
        q, k, v = self.qkv(x).view(rows, seq, 3, n_heads, d_head).permute(2, 0, 3, 1, 4)
        scores = (q * d_head**-0.5) @ k.transpose(-2, -1)
        probabilities = widened(scores.masked_fill(hidden, -math.inf)).softmax(-1)
        if masks is not None:
            probabilities = masks.drop(probabilities, site, dim=1, first=self.axis.rank * n_heads)
        mixed = (probabilities @ v).transpose(1, 2).reshape(rows, seq, n_heads * d_head)
        return cast(Tensor, self.out(mixed))


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity and a dropout between."""

    def __init__(self, table: ParameterTable, part: Part, name: str, activation: Activation) -> None:
        super().__init__()
        self.up = Linear(table, part, f"{name}.up")
        self.down = RowLinear(table, part, f"{name}.down")
        self.axis = part.axis
        self.enter, _ = crossing(part)
        self._activation = F.relu if activation is Activation.relu else F.gelu

    def forward(self, x: Tensor, masks: Masks | None, site: int) -> Tensor:
        """x: [rows, positions held, d_model]"""
        x = self._activation(self.up(self.enter(x, self.axis)))
        if masks is not None:
            x = masks.drop(x, site, dim=2, first=self.axis.rank * x.shape[2])
        return cast(Tensor, self.down(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each with its residual sum and normalisation."""

    def __init__(self, table: ParameterTable, part: Part, name: str, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(table, part, f"{name}.attention")
        self.attention_norm = LayerNorm(table, part, f"{name}.attention_norm")
        self.feed_forward = FeedForward(table, part, f"{name}.feed_forward", shape.activation)
        self.feed_forward_norm = LayerNorm(table, part, f"{name}.feed_forward_norm")
        self._pre = shape.norm is Norm.pre
        self._rank = part.axis.rank if part.sequence_parallel else 0

    def forward(self, x: Tensor, hidden: Tensor, masks: Masks | None) -> Tensor:
        """x: [rows, positions held, d_model]; hidden: see `attention_mask`

        masks: with the keys of BLOCK_SITES alone, so that all layers compute the same; None: nothing is dropped
        """

        def dropped(y: Tensor, site: int) -> Tensor:
            return y if masks is None else masks.drop(y, site, first=self._rank * y.shape[1])

        if self._pre:
            x = x + dropped(self.attention(self.attention_norm(x), hidden, masks, 0), 1)
            return x + dropped(self.feed_forward(self.feed_forward_norm(x), masks, 2), 3)
        x = self.attention_norm(x + dropped(self.attention(x, hidden, masks, 0), 1))
        return cast(Tensor, self.feed_forward_norm(x + dropped(self.feed_forward(x, masks, 2), 3)))


def _of_layer(masks: Masks | None, layer: int) -> Masks | None:
    """The dropout of a layer's sites."""
    first = 1 + layer * len(BLOCK_SITES)
    return masks and replace(masks, keys=masks.keys[first : first + len(BLOCK_SITES)])


class Transformer(nn.Module):
    """The model, or the part of it that a rank holds, built on the meta device; `parallel.table.materialise` gives it
    values.

    Raises nothing of its own: a shape that can't be built is refused by config.check.
    """

    def __init__(self, shape: Shape, table: ParameterTable | None = None, part: Part | None = None) -> None:
        super().__init__()
        table = table or parameter_table(shape)
        part = part or whole(shape)
        end = shape.n_layers
        self.shape, self.part = shape, part
        self.embedding = Embedding(table, part, "embedding") if -1 in part.layers else None
        if self.embedding is not None and shape.positions is Positions.learned:
            self.positions = Embedding(table, part, "positions")
        here = [layer for layer in range(shape.n_layers) if layer in part.layers]
        self.layers = nn.ModuleDict({str(layer): Block(table, part, f"layers.{layer}", shape) for layer in here})
        if end in part.layers and shape.norm is Norm.pre:
            self.norm = LayerNorm(table, part, "norm")
        self.head = Linear(table, part, "head") if end in part.layers else None
        self._sinusoid = torch.empty(0)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor,
        masks: Masks | None = None,
        run: Run = plainly,
        seq: int | None = None,
    ) -> Tensor:
        """Logits: [rows, seq, words held] of a language model, [rows, classes] of a classifier; [rows, positions held,
        d_model] where the head is another rank's.

        x: int64 [rows, seq], or [rows, positions held, d_model] where the embedding is another rank's
        lengths: int64 [rows], positions from there on are padding
        masks: the micro-batch's dropout; None drops nothing
        run: computes each place
        seq: of the whole sequences, where x may be a slice of them; by default x's
        """
        seq = seq or x.shape[1]
        hidden = attention_mask(lengths, self._padded(seq), self.shape.causal)
        if self.embedding is not None:
            x = run(-1, partial(self._embed, masks=masks), x)
        for layer, block in self.layers.items():
            x = run(int(layer), partial(block, hidden=hidden, masks=_of_layer(masks, int(layer))), x)
        return x if self.head is None else run(self.shape.n_layers, partial(self._logits, seq=seq), x)

    def _padded(self, seq: int) -> int:
        """Positions of a sequence where it is whole: with padding, if slices of it could not be equal without."""
        return self.part.positions(seq).size * (self.part.axis.ranks if self.part.sequence_parallel else 1)

    def _embed(self, indices: Tensor, masks: Masks | None) -> Tensor:
        """[rows, positions held, d_model] of int64 [rows, seq]."""
        assert self.embedding is not None
        seq = indices.shape[1]
        own = self.part.positions(seq)
        x = self.embedding(F.pad(indices, (0, self._padded(seq) - seq)))
        x = x * math.sqrt(self.shape.d_model) + self._position_vectors(own)
        return x if masks is None else masks.drop(x, 0, first=own.first)

    def _logits(self, x: Tensor, seq: int) -> Tensor:
        assert self.head is not None
        if self.shape.norm is Norm.pre:
            x = self.norm(x)
        if not self.shape.causal:
            return cast(Tensor, self.head(first_tokens(x, self.part)))
        enter, _ = crossing(self.part)
        x = enter(x, self.part.axis)
        return cast(Tensor, self.head(x if x.shape[1] == seq else x[:, :seq]))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the targets that are not IGNORE: a scalar.

        logits: what `forward` returned; targets: int64 [rows, seq] or [rows]
        """
        if not self.shape.causal or self.part.axis.ranks == 1:
            return summed_cross_entropy(logits, targets)
        words = span(self.shape.vocab_size, self.part.axis)
        flat = logits.flatten(0, -2), targets.flatten()
        return vocabulary_cross_entropy(*flat, words.first, words.valid, self.part.axis)

    def _position_vectors(self, own: Span) -> Tensor:
        """[positions held, d_model] in the parameters' dtype, on their device."""
        stop = own.first + own.size
        if self.shape.positions is Positions.learned:
            learned = self.positions.weight[own.first : own.first + own.valid]
            return learned if own.valid == own.size else F.pad(learned, (0, 0, 0, own.size - own.valid))
        assert self.embedding is not None
        like = self.embedding.weight
        if len(self._sinusoid) < stop or self._sinusoid.dtype != like.dtype or self._sinusoid.device != like.device:
            self._sinusoid = sinusoid(stop, self.shape.d_model).to(like)
        return self._sinusoid[own.first : stop]
