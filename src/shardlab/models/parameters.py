"""The Transformer's parameter table, written from its shape alone.

Laws of initialisation are those of the classic code: uniform +-0.1 for embedding and head, zero head bias; in the
blocks torch's own: Glorot (Xavier) uniform for the joint query-key-value matrix with zero bias, and nn.Linear's
U(+-1/sqrt(fan_in)) elsewhere, with a zero bias for attention's output (`nn.MultiheadAttention._reset_parameters`).
Fans are those of the whole matrix, whatever a rank holds of it.

tensor_dim names the dim that the tensor axis cuts, as in the Megatron paper: heads and feed-forward by columns,
then rows; embedding and head by vocabulary. What it doesn't cut has the same gradient on all its ranks, but under
sequence parallelism where it is used between the matrices: there each rank has that of its own positions.
"""

import math

from shardlab.config.schema import Positions
from shardlab.models.shape import Shape
from shardlab.parallel.mesh import DATA_AXES
from shardlab.parallel.table import Constant, Entry, Normal, ParameterTable, Uniform


def parameter_table(shape: Shape, sequence_parallel: bool = False) -> ParameterTable:
    """All parameters of the whole model, in forward order.

    sequence_parallel: the tensor axis's ranks use what stands between their matrices on different positions
    """
    table = ParameterTable()
    d, heads, d_head, d_ff = shape.d_model, shape.n_heads, shape.d_head, shape.d_ff
    end = shape.n_layers
    between = (*DATA_AXES, "tensor") if sequence_parallel else DATA_AXES
    table.add(Entry("embedding.weight", (shape.vocab_size, d), Uniform(0.1), layer=-1, tensor_dim=0))
    if shape.positions is Positions.learned:
        table.add(Entry("positions.weight", (shape.max_len, d), Normal(1.0), layer=-1, summed_over=between))
    for layer in range(shape.n_layers):
        name = f"layers.{layer}"
        glorot, from_d, from_ff = Uniform(math.sqrt(6 / (d + 3 * d))), Uniform(d**-0.5), Uniform(d_ff**-0.5)
        table.add(Entry(f"{name}.attention.qkv.weight", (3, heads, d_head, d), glorot, layer, tensor_dim=1))
        table.add(Entry(f"{name}.attention.qkv.bias", (3, heads, d_head), Constant(0.0), layer, tensor_dim=1))
        table.add(Entry(f"{name}.attention.out.weight", (d, heads, d_head), from_d, layer, tensor_dim=1))
        table.add(Entry(f"{name}.attention.out.bias", (d,), Constant(0.0), layer, summed_over=between))
        _add_norm(table, f"{name}.attention_norm", d, layer, between)
        table.add(Entry(f"{name}.feed_forward.up.weight", (d_ff, d), from_d, layer, tensor_dim=0))
        table.add(Entry(f"{name}.feed_forward.up.bias", (d_ff,), from_d, layer, tensor_dim=0))
        table.add(Entry(f"{name}.feed_forward.down.weight", (d, d_ff), from_ff, layer, tensor_dim=1))
        table.add(Entry(f"{name}.feed_forward.down.bias", (d,), from_ff, layer, summed_over=between))
        _add_norm(table, f"{name}.feed_forward_norm", d, layer, between)
    if shape.norm.name == "pre":
        _add_norm(table, "norm", d, end, between)
    vocabulary = 0 if shape.causal else None
    tied_to = "embedding.weight" if shape.tie else None
    table.add(Entry("head.weight", (shape.outputs, d), Uniform(0.1), end, tensor_dim=vocabulary, tied_to=tied_to))
    table.add(Entry("head.bias", (shape.outputs,), Constant(0.0), end, tensor_dim=vocabulary))
    return table


def _add_norm(table: ParameterTable, name: str, d_model: int, layer: int, summed_over: tuple[str, ...]) -> None:
    table.add(Entry(f"{name}.weight", (d_model,), Constant(1.0), layer, summed_over=summed_over))
    table.add(Entry(f"{name}.bias", (d_model,), Constant(0.0), layer, summed_over=summed_over))
