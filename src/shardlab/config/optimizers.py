"""Which optimizers may be named, and what state each keeps, found out without importing torch.

torch.optim's source is parsed instead: 0.05 s against 1.4 s or more for the import, so that a misspelt optimizer
or argument is answered at once. Only values need the class itself: a negative momentum is torch's to judge.
"""

import ast
import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardlab.config.complaint import nearest
from shardlab.config.schema import OptimizerConfig
from shardlab.errors import ShardlabError

REFUSED = {
    "LBFGS": "it evaluates the loss several times within one step, which a fixed global batch per step rules out",
    "SparseAdam": "it takes sparse gradients only, and the model's are dense",
    "Muon": "it takes matrices only, and the model has vectors too (biases, norms)",
}
"""Classes of torch.optim that cannot train this model, and why."""

MATRIX_WISE = ("Adafactor",)
"""Classes whose update of an element depends on its whole matrix: a slice of it would train another run."""

GIVEN = ("self", "params", "lr")
"""Arguments that are not keyword arguments of the user's: lr has a key of its own."""


JUDGED_LATE = ("capturable", "differentiable", "foreach", "fused")
"""Arguments that torch looks at in a step only; a step imports torch's compiler too, which takes a second."""


@cache
def optimizers() -> dict[str, tuple[str, ...]]:
    """Each optimizer class of the installed torch with the names of its keyword arguments."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ShardlabError("torch is not installed in this environment; pip install torch")
    folder = Path(spec.submodule_search_locations[0]) / "optim"
    classes: dict[str, tuple[str, ...]] = {}
    bases: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[node.name] = _arguments(node)

    def is_optimizer(name: str) -> bool:
        return any(base == "Optimizer" or is_optimizer(base) for base in bases.get(name, []))

    return {name: names for name, names in classes.items() if is_optimizer(name) and not name.startswith("_")}


def _arguments(node: ast.ClassDef) -> tuple[str, ...]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            return tuple(argument.arg for argument in arguments if argument.arg not in GIVEN)
    return ()


_STATE = {
    "ASGD": 1,  # an average of the parameters
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 0,
}
"""Tensors of a parameter's shape that a class keeps with its default arguments."""

_MORE_STATE = {
    ("Adam", "amsgrad"),
    ("AdamW", "amsgrad"),
    ("RMSprop", "centered"),
    ("RMSprop", "momentum"),
    ("SGD", "momentum"),
}
"""Arguments that, if they are not zero or false, make a class keep one tensor more."""


def state_elements(config: OptimizerConfig, shape: tuple[int, ...]) -> int:
    """Elements that an optimizer keeps of a parameter, from its first update on, but for a few scalars.

    A class that isn't known is taken to keep two moments, as Adam does.
    """
    if config.name == "Adafactor" and len(shape) > 1:  # a second moment for each row and each column
        return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
    if config.name == "Adafactor":
        return math.prod(shape)
    more = sum(config.name == name and bool(config.kwargs.get(argument)) for name, argument in _MORE_STATE)
    return (_STATE.get(config.name, 2) + more) * math.prod(shape)


def check_optimizer(config: OptimizerConfig, *, values: bool = True) -> None:
    """Raise ShardlabError unless torch.optim has the class, with these arguments and values, and it can train.

    values: let torch judge those of the arguments
    """
    known = optimizers()
    usable = [name for name in known if name not in REFUSED]
    if config.name in REFUSED:
        raise ShardlabError(f"optimizer.name={config.name} cannot be used: {REFUSED[config.name]}")
    if config.name not in known:
        raise ShardlabError(f"unknown optimizer.name={config.name}{nearest(config.name, usable)} ({', '.join(usable)})")
    for name in config.kwargs:
        if name == "lr":
            raise ShardlabError("optimizer.kwargs.lr is set twice: the learning rate is optimizer.lr")
        if name not in known[config.name]:
            allowed = ", ".join(known[config.name])
            raise ShardlabError(
                f"optimizer.kwargs.{name}: {config.name} has no such argument{nearest(name, known[config.name])}"
                f" (it has {allowed})"
            )
    if config.kwargs and values:
        _try_values(config.name, config.lr, config.kwargs)


def _try_values(name: str, lr: float, kwargs: dict[str, Any]) -> None:
    """Let torch judge the values, on a small matrix; some are only looked at in the first step."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    try:
        optimizer = getattr(torch.optim, name)([parameter], lr=lr, **kwargs)
        if not kwargs.keys().isdisjoint(JUDGED_LATE):
            optimizer.step()
    except Exception as error:  # whatever torch makes of them, they are the user's values
        reason = " ".join(str(error).split())
        raise ShardlabError(f"optimizer.kwargs: {name} refuses {kwargs}: {reason}") from None
