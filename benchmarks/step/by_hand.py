"""Training steps of our Transformer as one writes them by hand in plain torch: nothing in this file knows shardlab.

One language model (post-norm, relu, sinusoidal positions) and four loops around it: one process,
DistributedDataParallel, torch's pipelining, and the Megatron split. Dropout draws from torch's own generator, as
one would; so its masks depend on how the work is split, and losses with dropout can't be compared between loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch  # untyped where Function.apply and a module's call are: hence the ignores below
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm


@dataclass(frozen=True)
class Size:
    """The model's numbers. seq: positions of a row."""

    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int
    dropout: float
    vocabulary: int
    seq: int


@dataclass(frozen=True)
class Recipe:
    """How a step trains. micro_batches: of the global batch; targets: in the global batch."""

    lr: float
    clip: float
    micro_batches: int
    targets: int


Step = Callable[[Tensor, Tensor], tuple[float, float]]
"""A step on inputs and targets, int64 [rows, seq] of the whole global batch; returns loss and gradient norm."""


class Enter(torch.autograd.Function):
    """Megatron's f: identity, and backward the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: whole on every rank"""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient comes fresh out of a matrix product: it is summed in place."""
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Megatron's g: the ranks' sum in place, and backward identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: this rank's summand"""
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """As it is."""
        return grads[0]


class SplitCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy over logits that are split by vocabulary, in place as in Megatron's own code."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        """logits: [n, words here], of words from `first` on; targets: int64 [n]"""
        own, outside = own_words(targets, first, logits.shape[1])
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits.sub_(largest.unsqueeze(1))
        picked = logits.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill_(outside, 0.0)
        exps = logits.exp_()
        totals = torch.stack([exps.sum(-1), picked])
        dist.all_reduce(totals)
        ctx.save_for_backward(exps, totals[0], own, outside)
        return (totals[0].log() - totals[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Softmax minus one at the target."""
        exps, sums, own, outside = ctx.saved_tensors
        grad = exps.mul_((grads[0] / sums).unsqueeze(1))
        at_target = (-grads[0]).expand_as(sums).masked_fill(outside, 0.0)
        return grad.scatter_add_(1, own.unsqueeze(1), at_target.unsqueeze(1)), None, None


def own_words(words: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices into this rank's slice of the vocabulary, and which words lie outside of it (index 0)."""
    own = words - first
    outside = (own < 0) | (own >= size)
    return own.masked_fill_(outside, 0), outside


class Block(nn.Module):
    """A layer, or one rank's heads and features of it."""

    def __init__(self, size: Size, ranks: int) -> None:
        super().__init__()
        d = size.d_model
        self.split, self.dropout = ranks > 1, size.dropout
        self.heads, self.d_head = size.n_heads // ranks, d // size.n_heads
        self.qkv = nn.Linear(d, 3 * d // ranks)
        self.out = nn.Linear(d // ranks, d)
        self.norm1 = nn.LayerNorm(d)
        self.up = nn.Linear(d, size.d_ff // ranks)
        self.down = nn.Linear(size.d_ff // ranks, d)
        self.norm2 = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, seq, d_model]"""
        rows, seq, _ = x.shape
        p = self.dropout if self.training else 0.0
        qkv = self.qkv(self.enter(x)).view(rows, seq, 3, self.heads, self.d_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.leave(self.out, mixed.transpose(1, 2).reshape(rows, seq, -1))
        x = self.norm1(x + F.dropout(y, p, self.training))
        y = F.dropout(F.relu(self.up(self.enter(x))), p, self.training)
        out: Tensor = self.norm2(x + F.dropout(self.leave(self.down, y), p, self.training))
        return out

    def enter(self, x: Tensor) -> Tensor:
        """Into the split matrices."""
        return Enter.apply(x) if self.split else x  # type: ignore[no-untyped-call]

    def leave(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Out of them: the products are summed, the bias added once."""
        if not self.split:
            return linear(x)  # type: ignore[no-any-return]
        return Leave.apply(F.linear(x, linear.weight)) + linear.bias  # type: ignore[no-any-return, no-untyped-call]


class Model(nn.Module):
    """The language model, or what one rank holds of it.

    places: -1 the embedding, 0..n_layers-1 the layers, n_layers the head; a pipeline's stage has some of them
    rank, ranks: of the Megatron split
    """

    def __init__(self, size: Size, places: range, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        words, d = size.vocabulary // ranks, size.d_model
        self.split, self.first, self.scale, self.dropout = ranks > 1, rank * words, math.sqrt(d), size.dropout
        self.embedding = nn.Embedding(words, d) if -1 in places else None
        self.layers = nn.Sequential(*[Block(size, ranks) for place in places if 0 <= place < size.n_layers])
        self.head = nn.Linear(d, words) if size.n_layers in places else None
        self.positions: Tensor
        angle = torch.arange(size.seq).unsqueeze(1) * torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        self.register_buffer("positions", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: int64 [rows, seq], or activations; returns logits, or activations where the head is another stage's"""
        if self.embedding is not None:
            x = F.dropout(self.embed(x) * self.scale + self.positions, self.dropout, self.training)
        x = self.layers(x)
        if self.head is None:
            return x
        if self.split:
            x = Enter.apply(x)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]

    def embed(self, words: Tensor) -> Tensor:
        """[rows, seq, d_model], whole on every rank."""
        assert self.embedding is not None
        if not self.split:
            return self.embedding(words)  # type: ignore[no-any-return]
        own, outside = own_words(words, self.first, self.embedding.num_embeddings)
        return Leave.apply(self.embedding(own).masked_fill_(outside.unsqueeze(-1), 0.0))  # type: ignore[no-any-return, no-untyped-call]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed over the targets."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def single(model: Model, recipe: Recipe) -> Step:
    """One process: gradients accumulate over the micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)

    def step(inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        total = torch.zeros(())
        pairs = zip(inputs.chunk(recipe.micro_batches), targets.chunk(recipe.micro_batches), strict=True)
        for x, y in pairs:
            loss = cross_entropy(model(x), y) / recipe.targets
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        return float(total), float(norm)

    return step


def ddp(model: Model, recipe: Recipe) -> Step:
    """DistributedDataParallel, which sends in the last micro-batch alone; it averages, hence the factor."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        total = torch.zeros(())
        mine = range(rank, recipe.micro_batches, ranks)
        xs, ys = inputs.chunk(recipe.micro_batches), targets.chunk(recipe.micro_batches)
        for number in mine:
            with nullcontext() if number == mine[-1] else wrapped.no_sync():
                loss = cross_entropy(wrapped(xs[number]), ys[number]) / recipe.targets
                (loss * ranks).backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm = clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        return float(total), float(norm)

    return step


def pipeline(model: Model, recipe: Recipe, schedule: str) -> Step:
    """torch.distributed.pipelining as its manual has it. schedule: 1f1b or gpipe"""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runs = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule](
        PipelineStage(model, rank, ranks, torch.device("cpu")),
        recipe.micro_batches,
        loss_fn=lambda logits, targets: cross_entropy(logits, targets) / recipe.targets,
        scale_grads=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)

    def step(inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            runs.step(inputs, return_outputs=False)
        elif rank == ranks - 1:
            runs.step(target=targets, losses=losses, return_outputs=False)
        else:
            runs.step(return_outputs=False)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        totals = torch.stack([get_total_norm(grads).square(), sum((x.detach() for x in losses), torch.zeros(()))])
        dist.all_reduce(totals)
        norm = totals[0].sqrt()
        clip_grads_with_norm_(model.parameters(), recipe.clip, norm)
        optimizer.step()
        return float(totals[1]), float(norm)

    return step


def tensor(model: Model, recipe: Recipe) -> Step:
    """The Megatron split. Both ranks should seed torch's generator alike: what both hold is then dropped alike."""
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr)
    whole = [p for name, p in model.named_parameters() if "norm" in name or name.endswith(("out.bias", "down.bias"))]
    cut = [p for p in model.parameters() if not any(p is other for other in whole)]

    def step(inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        optimizer.zero_grad()
        total = torch.zeros(())
        pairs = zip(inputs.chunk(recipe.micro_batches), targets.chunk(recipe.micro_batches), strict=True)
        for x, y in pairs:
            summed: Tensor = SplitCrossEntropy.apply(model(x).flatten(0, 1), y.flatten(), model.first)  # type: ignore[no-untyped-call]
            loss = summed / recipe.targets
            loss.backward()
            total += loss.detach()
        square = get_total_norm([p.grad for p in cut if p.grad is not None]).square()
        dist.all_reduce(square)
        norm = (square + get_total_norm([p.grad for p in whole if p.grad is not None]).square()).sqrt()
        clip_grads_with_norm_(model.parameters(), recipe.clip, norm)
        optimizer.step()
        return float(total), float(norm)

    return step
