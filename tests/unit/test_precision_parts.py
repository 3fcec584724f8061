"""The loss scale, and what a step that is not finite comes to, without a process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardlab.training.precision as precision
from shardlab.config.schema import OnNonFinite, Precision
from shardlab.errors import RunEnded
from shardlab.launch.cause import describe_failure
from shardlab.parallel.loss import summed_cross_entropy, widened
from shardlab.parallel.mesh import Mesh, connect
from shardlab.parallel.microbatch import take
from shardlab.training.nonfinite import MOST_SKIPPED, Skipped, lost_micro_batch, skip_or_end
from shardlab.training.precision import LossScale, loss_scale, unscale

GOOD, BAD = True, False
SEQUENCES = [
    [GOOD] * 7,
    [BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD],  # an overflow begins the count anew
    [BAD] * 4 + [GOOD] * 9,
]


@pytest.mark.parametrize("steps", SEQUENCES)
def test_the_scale_goes_as_that_of_torchs_scaler(steps, monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 3)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torchs, ours = torch.amp.GradScaler("cpu", growth_interval=3), LossScale()
    for good in steps:
        torchs.scale(weight * (1.0 if good else math.inf)).backward()
        assert torchs.get_scale() == ours.value
        torchs.step(optimizer)
        torchs.update()
        optimizer.zero_grad()
        ours.grow() if good else ours.back_off()
    assert torchs.get_scale() == ours.value


def test_the_scales_constants_are_torchs():
    torchs = torch.amp.GradScaler("cpu")
    constants = (torchs.get_scale(), torchs.get_growth_factor(), torchs.get_backoff_factor())
    assert constants == (precision.FIRST_SCALE, precision.GROWTH, precision.BACKOFF)
    assert torchs.get_growth_interval() == precision.GROWTH_INTERVAL


def test_only_fp16_scales_its_loss():
    assert [each for each in Precision if loss_scale(each) is not None] == [Precision.fp16]


def test_a_scale_stays_where_its_inverse_is_exact():
    scale = LossScale(precision.LARGEST_SCALE, precision.GROWTH_INTERVAL - 1)
    scale.grow()
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 1e-3]) * scale.value
    unscale([(None, weight)], scale)
    assert torch.equal(weight.grad, torch.tensor([3.0, 1e-3]))


LOST = "the loss of micro-batch 3 on rank 1 is nan"
ENDS = [
    # lost, norm,    policy,            scale -> the reason that ends the run, or the scale after a skip
    (LOST, math.nan, OnNonFinite.stop, None, f"step 7: {LOST}; nothing was updated, trainer.on_nonfinite=skip would"),
    (LOST, math.nan, OnNonFinite.skip, None, None),
    (LOST, math.nan, OnNonFinite.stop, 8.0, f"step 7: {LOST}; nothing was updated, trainer.on_nonfinite=skip would"),
    (LOST, math.nan, OnNonFinite.skip, 8.0, 8.0),  # no scale can mend a loss
    (None, math.inf, OnNonFinite.stop, None, "step 7: the gradient norm is inf; nothing was updated, trainer.on_"),
    (None, math.inf, OnNonFinite.skip, None, None),
    (None, math.inf, OnNonFinite.stop, 2.0, 1.0),
    (None, math.inf, OnNonFinite.stop, 1.0, "the gradient norm is inf at a loss scale of 1; nothing was updated, prec"),
    (None, math.inf, OnNonFinite.skip, 1.0, 1.0),
]


@pytest.mark.parametrize(("lost", "norm", "policy", "scale", "comes"), ENDS)
def test_a_step_that_is_not_finite_ends_the_run_or_is_skipped(lost, norm, policy, scale, comes):
    skipped, state = Skipped(), None if scale is None else LossScale(scale, 5)
    if isinstance(comes, str):
        with pytest.raises(RunEnded) as ended:
            skip_or_end(7, lost, norm, policy, skipped, state)
        assert comes in str(ended.value)
        return
    skip_or_end(7, lost, norm, policy, skipped, state)
    assert skipped.in_a_row == 1
    assert (None if state is None else state.value) == comes


def test_a_run_that_skips_every_step_comes_to_an_end():
    skipped = Skipped()
    for step in range(1, MOST_SKIPPED):
        skip_or_end(step, LOST, math.nan, OnNonFinite.skip, skipped, None)
    with pytest.raises(RunEnded, match=f"the last of {MOST_SKIPPED} skipped steps in a row"):
        skip_or_end(MOST_SKIPPED, LOST, math.nan, OnNonFinite.skip, skipped, None)


def test_the_first_lost_micro_batch_is_named():
    mesh = connect(Mesh(), 0, "cpu", 1.0)
    ones = torch.ones(4, 2, dtype=torch.int64)
    micro_batches = [take(number, range(1), 1, ones, ones, ones[:, 0]) for number in (2, 5, 6)]

    def lost(*losses: float) -> str | None:
        return lost_micro_batch(mesh, micro_batches, [torch.tensor(loss) for loss in losses])

    assert lost(1.0, -math.inf, math.nan) == "the loss of micro-batch 5 on rank 0 is -inf"
    assert lost(1.0, 2.0, 3.0) is None
    assert lost() is None  # the head is another rank's


def test_the_reason_of_a_run_that_ends_itself_is_the_whole_message():
    failure = describe_failure(RunEnded("step 7: why"), when=1.0)
    assert (failure.run_ended, failure.user_error, failure.echo) == ("step 7: why", None, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_loss_is_computed_in_fp32_at_least(dtype):
    logits, targets = torch.randn(3, 5, 9).to(dtype), torch.zeros(3, 5, dtype=torch.int64)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert widened(logits).dtype == summed_cross_entropy(logits, targets).dtype == wide
    assert torch.equal(summed_cross_entropy(logits, targets), summed_cross_entropy(logits.to(wide), targets))
