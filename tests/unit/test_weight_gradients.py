"""The backward pass in two parts gives what autograd gives in one, whenever the second part is done."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.parallel import weight_gradients
from shardlab.parallel.weight_gradients import WeightGradients

FEATURES = [
    # inputs, the weight's dims for the outputs
    (6, (5,)),
    (6, (3, 2, 4)),
    (6, (11,)),  # in columns of 4, the last ones fewer
]


@pytest.fixture(autouse=True)
def _narrow_columns(monkeypatch):
    monkeypatch.setattr(weight_gradients, "_WIDE", 10)
    monkeypatch.setattr(weight_gradients, "_COLUMNS", 4)


def made(inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter, list[Tensor]]:
    """Weight, bias, and the inputs of three micro-batches, the same in each call."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    xs = [values(2, 3, inputs).requires_grad_() for _ in range(3)]
    return nn.Parameter(values(*outputs, inputs)), nn.Parameter(values(*outputs)), xs


def autograd(inputs, outputs, dtype, with_bias, autocast) -> list[Tensor | None]:
    """Outputs, and gradients of inputs, weight and bias, of F.linear."""
    weight, bias, xs = made(inputs, outputs, dtype)
    with autocast():
        ys = [F.linear(x, weight.reshape(-1, inputs), bias.flatten() if with_bias else None) for x in xs]
    for y in ys:
        y.float().square().sum().backward() if y.dtype == torch.bfloat16 else y.square().sum().backward()
    return [*(y.detach() for y in ys), *(x.grad for x in xs), weight.grad, bias.grad]


def in_two_parts(inputs, outputs, dtype, with_bias, autocast) -> list[Tensor | None]:
    """The same by WeightGradients: the first micro-batch's at once, the second's and the third's put off."""
    arrived: list[nn.Parameter] = []
    split = WeightGradients(arrived.append)
    weight, bias, xs = made(inputs, outputs, dtype)
    with autocast():
        ys = [split.product(x, weight, bias if with_bias else None) for x in xs]

    def backward(y: Tensor) -> None:
        y.float().square().sum().backward() if y.dtype == torch.bfloat16 else y.square().sum().backward()

    backward(ys[0])
    assert len(arrived) == 1
    assert weight.grad is not None
    first = weight.grad.clone()
    for number in (1, 2):
        with split.putting_off(number):
            backward(ys[number])
        assert xs[number].grad is not None, "what the stage before waits for is here"
    assert torch.equal(weight.grad, first), "and the weight's is not"
    for number in (1, 2):
        split.compute(number)
        split.compute(number)  # once and for all
    assert len(arrived) == 3
    assert all(parameter is weight for parameter in arrived)
    return [*(y.detach() for y in ys), *(x.grad for x in xs), weight.grad, bias.grad]


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), FEATURES)
@pytest.mark.parametrize("autocast", [nullcontext, bf16], ids=["plain", "autocast"])
def test_outputs_and_gradients_are_autograds(autocast, inputs, outputs, with_bias):
    dtype, rounding = (torch.float64, 1e-14) if autocast is nullcontext else (torch.float32, 2e-2)
    arguments = (inputs, outputs, dtype, with_bias, autocast)
    for expected, found in zip(autograd(*arguments), in_two_parts(*arguments), strict=True):
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= rounding * float(expected.abs().max())


def test_a_weights_values_may_be_away_between_forward_and_backward():
    """Under ZeRO 3 they are, and autograd's own product would say that they were changed."""
    weight, _, xs = made(6, (5,), torch.float64)
    values = weight.detach().clone()
    y = WeightGradients(lambda _: None).product(xs[0], weight, None)
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(values.nbytes)
    weight.data.copy_(values)
    y.sum().backward()
    assert torch.allclose(xs[0].grad, values.sum(0).expand_as(xs[0]))


def test_nothing_but_the_input_is_kept_for_backward():
    """No bf16 copy of the weight, which autocast's own product would keep until backward."""
    weight, bias, xs = made(6, (5,), torch.float32)
    kept: list[Tensor] = []
    with bf16(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        WeightGradients(lambda _: None).product(xs[0], weight, bias)
    assert [x.shape for x in kept] == [xs[0].shape]


def test_the_gradient_of_a_wide_product_is_added_up_in_fp32():
    """Added in bf16, the 29 parts that WikiText-2's words make had five times the plain path's error."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 32, requires_grad=True), nn.Parameter(torch.randn(20_000, 32))
    with torch.autocast("cpu", torch.bfloat16):
        y = WeightGradients(lambda _: None).product(x, weight, None)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = dy.double() @ weight.detach().bfloat16().double()
    assert float((x.grad - exact).norm() / exact.norm()) < 4e-3
