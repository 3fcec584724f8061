"""torch.compile, opt-in: each layer's forward and backward become kernels that torch makes for this machine.

Layer by layer, not the model: the layers are alike, so one compilation serves them all, and what stands around a place
(see `Run`) stays outside. The collectives of the tensor axis stay outside too: they are called as they are, between
the kernels.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor
from torch import nn


def compile_layers(models: list[nn.Module]) -> None:
    """Have the models' layers compiled when they are first called.

    The work is done in the rank itself: torch's pool of compiling processes would outlive a rank that is killed.
    """
    inductor.compile_threads = 1
    for model in models:
        for layer in model.layers.values():
            for module in layer.modules():
                for crossing in ("enter", "leave"):
                    if hasattr(module, crossing) and module.axis.group is not None:
                        setattr(module, crossing, torch.compiler.disable(getattr(module, crossing)))
            layer.compile()
