"""What 'the same' means: each quantity within its bound, and what isn't finite never."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from shardlab.analysis.same import BOUNDS, GROUPS, QUANTITIES, Outcome, compare, group_of, outcome_of
from shardlab.config.schema import Activation, ModelConfig, Norm, Positions, Precision
from shardlab.models.parameters import parameter_table
from shardlab.models.shape import shape_of

WEIGHTS = {
    "embedding.weight": np.array([[1.0, -2.0], [0.5, 0.0]]),
    "layers.0.attention.qkv.bias": np.array([[[1.0]], [[1e-20]], [[1.0]]]),
    "layers.0.attention.out.bias": np.array([1e-9, 0.0]),
    "layers.1.attention.out.bias": np.array([1.0, 0.0]),
    "layers.0.feed_forward.up.weight": np.array([3.0]),
    "norm.weight": np.array([1.0]),
    "head.weight": np.array([4.0]),
}
RUN = Outcome([2.0, 1.0], [5.0, 4.0], [("val at step 2", 1.5)], WEIGHTS)


def changed(name: str, add: list) -> Outcome:
    return replace(RUN, weights=WEIGHTS | {name: WEIGHTS[name] + np.array(add)})


QKV = [[[0.0]], [[0.0]], [[0.5]]]
CASES = [
    # the other run                                       what is beyond, where, by how much
    (replace(RUN, losses=[2.0, 1.0 + 1e-7]),              "loss", "step 2", 1e-7),
    (replace(RUN, losses=[2.0 + 4e-9, 1.1]),              "loss", "step 1", 2e-9),
    (replace(RUN, norms=[5.0, 4.4]),                      "grad_norm", "step 2", 0.1),
    (replace(RUN, norms=[5.0, None]),                     "grad_norm", "step 2", math.inf),
    (replace(RUN, evaluations=[("val at step 2", 1.8)]),  "evaluation", "val at step 2", 0.2),
    (replace(RUN, losses=[math.nan, 1.0]),                "loss", "step 1", math.inf),
    (changed("embedding.weight", [[0, 0], [0, 2e-3]]),    "embedding", "embedding.weight", 1e-3),
    (changed("layers.0.attention.qkv.bias", QKV), "attention", "layers.0.attention.qkv.bias", 0.5),
    (changed("layers.0.attention.out.bias", [1e-9, 0.0]), "attention", "layers.0.attention.out.bias", 1e-6),
    (changed("layers.0.feed_forward.up.weight", [0.3]),   "feed_forward", "layers.0.feed_forward.up.weight", 0.1),
    (changed("norm.weight", [math.nan]),                  "norms", "norm.weight", math.inf),
    (changed("head.weight", [math.inf]),                  "head", "head.weight", math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("other", "quantity", "where", "difference"), CASES)
def test_a_difference_is_found_where_it_is(other, quantity, where, difference):
    found = {apart.quantity: apart for apart in compare(RUN, other, BOUNDS["fp64"])}
    assert tuple(found) == QUANTITIES
    assert [name for name, apart in found.items() if apart.beyond is not None] == [quantity]
    assert found[quantity].beyond[:2] == (pytest.approx(difference), where)
    assert where in found[quantity].complaint


SAME = [
    RUN,
    replace(RUN, losses=[2.0 + 1e-10, 1.0]),
    changed("layers.0.attention.qkv.bias", [[[0.0]], [[7.0]], [[0.0]]]),  # the key part: its gradient is rounding
    changed("layers.0.attention.out.bias", [1e-13, 0.0]),  # small beside the other layer's
]


@pytest.mark.parametrize("other", SAME)
def test_rounding_is_the_same(other):
    assert all(apart.beyond is None for apart in compare(RUN, other, BOUNDS["fp64"]))


def test_a_step_that_both_runs_skip_is_the_same():
    events = [{"event": "step", "loss": 2.0, "grad_norm": math.inf, "skipped": True}]
    skipped = outcome_of(events, WEIGHTS)
    assert [apart.largest for apart in compare(skipped, skipped, BOUNDS["fp64"])] == [0.0] * len(QUANTITIES)


def test_an_element_that_rounding_sends_anywhere_is_the_same_in_fp32_alone():
    weights = {"head.weight": np.full(10_000, 0.1)}
    run, other = replace(RUN, weights=weights), replace(RUN, weights={"head.weight": weights["head.weight"].copy()})
    other.weights["head.weight"][7] += 5e-3
    verdicts = {name: compare(run, other, BOUNDS[name])[-1] for name in ("fp32", "fp64")}
    assert verdicts["fp32"].beyond is None
    assert verdicts["fp32"].largest == pytest.approx(5e-4)
    assert verdicts["fp64"].beyond[0] == pytest.approx(5e-2)


UNLIKE = [
    (replace(RUN, losses=[2.0]), "2 and 1 steps"),
    (replace(RUN, weights={}), "different tensors"),
    (replace(RUN, evaluations=[]), "different evaluations"),
]


@pytest.mark.parametrize(("other", "says"), UNLIKE)
def test_unlike_runs_are_not_compared(other, says):
    with pytest.raises(ValueError, match=says):
        compare(RUN, other, BOUNDS["fp64"])


def test_every_parameter_has_a_group_and_every_precision_its_bounds():
    model = ModelConfig("any", 2, 8, 2, 16, 0.0, Norm.pre, Activation.gelu, Positions.learned, tie=False)
    assert {group_of(entry.name) for entry in parameter_table(shape_of(model, 11, 0, 5))} == set(GROUPS)
    assert BOUNDS.keys() == {precision.name for precision in Precision}
