"""A model's shape: the size that the config chose, and what the dataset decides (task, vocabulary, longest row)."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.config.schema import Activation, ModelConfig, Norm, Positions


@dataclass(frozen=True)
class Shape:
    """Everything that fixes the parameter table.

    classes: 0 for a causal language model (whose head has vocab_size outputs), else the classifier's outputs
    max_len: positions that learned position vectors cover
    tie: the language model's head shares the embedding's weight
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int
    dropout: float
    norm: Norm
    activation: Activation
    positions: Positions
    tie: bool
    vocab_size: int
    classes: int
    max_len: int

    @property
    def d_head(self) -> int:
        """Features of one attention head."""
        return self.d_model // self.n_heads

    @property
    def outputs(self) -> int:
        """Outputs of the head."""
        return self.classes or self.vocab_size

    @property
    def causal(self) -> bool:
        """A position attends to itself and earlier ones only."""
        return self.classes == 0


def shape_of(model: ModelConfig, vocab_size: int, classes: int, max_len: int) -> Shape:
    """Join a config's size with what a dataset decides."""
    return Shape(
        model.n_layers,
        model.d_model,
        model.n_heads,
        model.d_ff,
        model.dropout,
        model.norm,
        model.activation,
        model.positions,
        model.tie and classes == 0,
        vocab_size,
        classes,
        max_len,
    )
