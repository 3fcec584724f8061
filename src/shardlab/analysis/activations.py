"""What forwards keep for backwards, by place of the model, and how much of it a schedule keeps at a time.

An estimate, counted from what each operation of models/layers.py and transformer.py saves for its backward; of what is
made and dropped again on the way, the largest that a place has is counted too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlab.analysis.traffic import checkpoints
from shardlab.analysis.work import Work
from shardlab.analysis.zero import is_matrix
from shardlab.config.schema import Activation, Norm
from shardlab.parallel.schedule import Kind


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro-batch at one place, or at several.

    saved: from its forward to its backward
    put_off: from its backward for the inputs to that for the weights, where these are two
    passing: the most that is made on the way in addition
    """

    saved: int = 0
    put_off: int = 0
    passing: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.saved + other.saved, self.put_off + other.put_off, max(self.passing, other.passing))


def activation_memory(work: Work, pipeline: int) -> int:
    """The most bytes that a rank keeps in a step. pipeline: its number on that axis"""
    kept = most = passing = 0
    held: dict[tuple[int, int], int] = {}
    for action in work.actions(pipeline):
        stage, number = key = action.stage, action.micro_batch
        of_stage = stage_activations(work, stage, checkpoints(work, number))
        passing = max(passing, of_stage.passing)
        now = {Kind.F: of_stage.saved, Kind.I: of_stage.put_off}.get(action.kind, 0)
        most = max(most, kept + max(0, now - held.get(key, 0)))
        kept += now - held.get(key, 0)
        held[key] = now
    return most + passing


def stage_activations(work: Work, stage: int, again: bool) -> Kept:
    """Of a micro-batch at a stage. again: its layers are computed again, and keep their inputs alone"""
    places = work.stages[stage]
    kept = sum((place_activations(work, place) for place in places if not (again and _is_layer(work, place))), Kept())
    layer = _layer(work)
    x = _sizes(work).slice_d * work.itemsize
    if again:
        for _ in filter(lambda place: _is_layer(work, place), places):
            kept += Kept(x, layer.put_off, layer.saved + layer.passing)
    if any(_is_layer(work, place) for place in places):  # attention's mask, one for all layers
        kept += Kept(work.cut.rows * work.positions(work.cut.seq) ** (2 if work.shape.causal else 1))
    return kept + Kept(sent_on(work, stage))


def sent_on(work: Work, stage: int) -> int:
    """Bytes of what goes to the next stage; it stays here for its backward, too."""
    return _sizes(work).slice_d * work.itemsize if stage < len(work.stages) - 1 else 0


def place_activations(work: Work, place: int) -> Kept:
    """Of a micro-batch at a place: -1 (embedding) to n_layers (norm and head, with the loss)."""
    if place == -1:
        return _embedding(work)
    return (_layer(work) if _is_layer(work, place) else _head(work)) + Kept(_weight_copies(work, place))


def _is_layer(work: Work, place: int) -> bool:
    return 0 <= place < work.shape.n_layers


def _weight_copies(work: Work, place: int) -> int:
    """Bytes of the rounded matrices that autocast makes and autograd keeps; weight_gradients.py's products don't."""
    if work.products or work.product_itemsize == work.itemsize:
        return 0
    part = work.part(0)
    sizes = (math.prod(part.shape(entry)) for entry in work.table if entry.layer == place and is_matrix(entry))
    return work.product_itemsize * sum(sizes)


@dataclass(frozen=True)
class _Sizes:
    """Elements of a micro-batch's activations on this rank.

    whole_d: whole sequences, as they enter the split matrices; slice_d: between these
    cut_d, hidden: heads' and feed-forward's features, as the tensor axis cuts them; scores: of the heads that are here
    """

    whole_d: int
    slice_d: int
    cut_d: int
    hidden: int
    scores: int


def _sizes(work: Work) -> _Sizes:
    shape, tensor, rows = work.shape, work.mesh.tensor, work.cut.rows
    held = work.positions(work.cut.seq)
    seq = held * tensor if work.config.strategy.sequence_parallel else held
    tokens = rows * seq
    return _Sizes(
        whole_d=tokens * shape.d_model,
        slice_d=rows * held * shape.d_model,
        cut_d=tokens * shape.d_model // tensor,
        hidden=tokens * shape.d_ff // tensor,
        scores=rows * shape.n_heads // tensor * seq * seq,
    )


def _embedding(work: Work) -> Kept:
    """The indices, and the mask of the dropout."""
    x = _sizes(work).slice_d * work.itemsize
    return Kept(8 * work.cut.tokens + (x if work.shape.dropout > 0 else 0), passing=2 * x)


def _layer(work: Work) -> Kept:
    """The inputs of the four products, q, k and v, the probabilities, what is normalised, and the dropouts' masks."""
    sizes, drops, wide, narrow = _sizes(work), work.shape.dropout > 0, work.itemsize, work.product_itemsize
    products = 2 * sizes.whole_d + sizes.cut_d + sizes.hidden
    hidden = 2 if drops else int(work.shape.activation is Activation.gelu)  # before the last product
    narrow_saved = products + 3 * sizes.cut_d + hidden * sizes.hidden
    masks = 2 * sizes.slice_d * drops
    scores = sizes.scores * (2 * wide + narrow if drops else wide)
    if work.product_itemsize != wide and not drops:
        scores += sizes.scores * narrow
    norms = 2 * sizes.slice_d + 4 * sizes.slice_d // work.shape.d_model
    gradients = 3 * sizes.cut_d + 2 * sizes.whole_d + sizes.hidden
    return Kept(
        narrow * narrow_saved + narrow * masks + scores + wide * norms,
        put_off=narrow * (products + gradients),
        passing=2 * max(sizes.scores * wide, sizes.hidden * narrow) + 2 * sizes.whole_d * wide,
    )


def _head(work: Work) -> Kept:
    """The final norm's input, the head's, and the probabilities of all words, which also pass twice as gradients."""
    sizes, shape, wide = _sizes(work), work.shape, work.itemsize
    normalised = wide * (sizes.slice_d + 2 * sizes.slice_d // shape.d_model) if shape.norm is Norm.pre else 0
    if not shape.causal:
        return Kept(normalised + wide * sizes.slice_d, passing=2 * wide * sizes.slice_d)
    logits = work.cut.tokens * math.ceil(shape.outputs / work.mesh.tensor)
    saved = normalised + work.product_itemsize * sizes.whole_d + wide * logits
    put_off = work.product_itemsize * (sizes.whole_d + logits)
    return Kept(saved, put_off, passing=wide * logits * (2 if work.mesh.tensor == 1 else 1))
