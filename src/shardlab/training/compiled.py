"""torch.compile, opt-in: each layer's forward and backward become kernels that torch makes for this machine.

Layer by layer, not the model: the layers are alike, so one compilation serves them all, and what stands around a place
(see `Run`) stays outside. The collectives of the tensor axis stay outside too: they are called as they are, between
the kernels. Where compiling is refused: config/strategies.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import Tensor

from shardlab.errors import ShardlabError
from shardlab.models.transformer import Transformer
from shardlab.parallel.dropout import kept
from shardlab.training.pulse import beat


def compile_layers(models: Iterable[Transformer], device: torch.device) -> None:
    """Have the models' layers compiled when they are first called.

    The work is done in the rank itself: torch's pool of compiling processes would outlive a rank that is killed. What
    it makes is kept in torch's own cache, for the other ranks and for later runs.

    Raises ShardlabError if there is nothing to compile with.
    """
    import torch._inductor.config as inductor  # takes time, which only who compiles should pay
    from torch._dynamo.callback import on_compile_end, on_compile_start

    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ShardlabError(
            f"runtime.compile=true needs a C++ compiler, and there is no {compiler}; "
            "install it, name another in CXX, or take runtime.compile=false"
        )
    inductor.compile_threads = 1
    for when in (on_compile_start, on_compile_end):  # a piece takes seconds, but all of a layer may take a minute
        when(lambda _: beat())
    _keep_masks_as_they_are()
    for model in models:
        for layer in model.layers.values():
            for module in layer.modules():
                for crossing in ("enter", "leave"):
                    if hasattr(module, crossing) and model.part.axis.group is not None:
                        setattr(module, crossing, torch.compiler.disable(getattr(module, crossing)))
            layer.compile()


def _keep_masks_as_they_are() -> None:
    """Make `kept` an operation that torch.compile calls and doesn't look into: dropout.py says why."""
    if hasattr(torch.ops.shardlab, "kept"):
        return
    schema = "(Tensor key, Tensor rows, SymInt[] firsts, SymInt[] sizes, float p) -> Tensor"
    operation = torch.library.custom_op("shardlab::kept", kept, mutates_args=(), schema=schema)

    @operation.register_fake
    def shape(key: Tensor, rows: Tensor, firsts: list[int], sizes: list[int], p: float) -> Tensor:
        return rows.new_empty((len(rows), *sizes), dtype=torch.bool)
