"""torch.compile, opt-in: each layer's forward and backward become kernels that torch makes for this machine.

Layer by layer, not the model: the layers are alike, so one compilation serves them all, and what stands around a place
(see `Run`) stays outside: gathering parameters, checkpointing. Within a layer, the tensor axis's collectives, the
products whose weights' gradients may be put off, and the hash of the masks are called as they are, between the kernels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from threading import RLock

import torch
from torch import Tensor

from shardlab.errors import ShardlabError
from shardlab.models.transformer import Transformer
from shardlab.parallel.dropout import kept
from shardlab.parallel.sequence import gather, scatter
from shardlab.parallel.tensor import enter, leave
from shardlab.parallel.weight_gradients import WeightGradients
from shardlab.training.pulse import beat


def compile_layers(models: Iterable[Transformer], weight_gradients: WeightGradients, device: torch.device) -> None:
    """Have the models' layers compiled when they are first called. weight_gradients: of the models

    The work is done in the rank itself: torch's pool of compiling processes would outlive a rank that is killed. What
    it makes is kept in torch's own cache, for the other ranks and for later runs.

    Raises ShardlabError if there is nothing to compile with.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor  # takes time, which only who compiles should pay
    from torch._dynamo.callback import on_compile_end, on_compile_start

    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ShardlabError(
            f"runtime.compile=true needs a C++ compiler, and there is no {compiler}; "
            "install it, name another in CXX, or take runtime.compile=false"
        )
    inductor.compile_threads = 1
    dynamo.recompile_limit = 64  # four matrices, with gradients or without, of some shapes: more than its 8
    for when in (on_compile_start, on_compile_end):  # a piece takes seconds, but all of a layer may take a minute
        when(lambda _: beat())
    _let_progress_bars_lock_threads_alone()
    _keep_masks_as_they_are()
    # One object for all layers: dynamo would take two for a reason to compile each layer anew.
    weight_gradients.product = torch.compiler.disable(weight_gradients.product)  # type: ignore[method-assign]
    outside = {crossing: torch.compiler.disable(crossing) for crossing in (enter, leave, gather, scatter)}
    for model in models:
        for layer in model.layers.values():
            for module in layer.modules():
                for name in ("enter", "leave"):
                    if hasattr(module, name) and model.part.axis.group is not None:
                        setattr(module, name, outside[getattr(module, name)])
            layer.compile()


def _let_progress_bars_lock_threads_alone() -> None:
    """torch's passes over a graph make a tqdm bar, shown or not, and that a semaphore between processes. A rank leaves
    without freeing it, of which Python would warn the user when the command ends."""
    with suppress(ImportError):
        import_module("tqdm").tqdm.set_lock(RLock())


def _keep_masks_as_they_are() -> None:
    """Make `kept` an operation that torch.compile calls and doesn't look into: dropout.py says why."""
    if hasattr(torch.ops.shardlab, "kept"):
        return
    schema = "(Tensor key, Tensor rows, SymInt[] firsts, SymInt[] sizes, float p) -> Tensor"
    operation = torch.library.custom_op("shardlab::kept", kept, mutates_args=(), schema=schema)

    @operation.register_fake
    def shape(key: Tensor, rows: Tensor, firsts: list[int], sizes: list[int], p: float) -> Tensor:
        return rows.new_empty((len(rows), *sizes), dtype=torch.bool)
