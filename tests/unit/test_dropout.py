"""The dropout hash: the right rate, no pattern, and the same mask however the work is cut."""

import itertools

import pytest
import torch

from shardlab.parallel.dropout import Masks, keep, mix, premix, step_keys

CPU = torch.device("cpu")
SIZES = (64, 48, 80)
"""rows, positions, features: 245,760 elements; a correlation's standard error is 0.002."""


def mask(seed: int = 1, step: int = 1, site: int = 0, p: float = 0.2, sizes: tuple[int, ...] = SIZES) -> torch.Tensor:
    keys = step_keys(seed, step, ["a", "b"], CPU)
    return keep(keys[site], [premix(torch.arange(size)) for size in sizes], p)


def z_of_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Standard score of the correlation of two equally shaped masks."""
    a, b = a.flatten().double(), b.flatten().double()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1] * a.numel() ** 0.5)


def test_mixer_is_lowbias32():
    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    values = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]
    signed = torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)
    assert [v % 2**32 for v in mix(signed).tolist()] == [lowbias32(v) for v in values]


@pytest.mark.parametrize("p", [0.05, 0.1, 0.2, 0.5, 0.9])
def test_rate(p):
    dropped = ~mask(p=p, sizes=(128, 64, 128))
    z = (dropped.double().mean() - p) / (p * (1 - p) / dropped.numel()) ** 0.5
    assert abs(z) < 4.5


def test_no_correlation_between_neighbours():
    base = mask()
    scores = {"step": z_of_correlation(base, mask(step=2)), "site": z_of_correlation(base, mask(site=1))}
    scores["seed"] = z_of_correlation(base, mask(seed=2))
    for offsets in itertools.product((0, 1, 2, 16), repeat=3):
        if any(offsets):
            ends = [slice(o, None) for o in offsets]
            starts = [slice(None, size - o) for size, o in zip(SIZES, offsets, strict=True)]
            scores[offsets] = z_of_correlation(base[tuple(ends)], base[tuple(starts)])
    worst = max(scores, key=lambda name: abs(scores[name]))
    assert abs(scores[worst]) < 4.5, (worst, scores[worst])


def test_rates_of_rows_and_positions_are_even():
    """No row, position or feature is dropped more often than chance has it."""
    dropped = (~mask(p=0.2)).double()
    for dims in [(1, 2), (0, 2), (0, 1)]:
        means = dropped.mean(dims)
        number = dropped.numel() / means.numel()
        chi2 = ((means - 0.2) ** 2 / (0.2 * 0.8 / number)).sum()
        assert abs(chi2 - means.numel()) < 5 * (2 * means.numel()) ** 0.5


def test_a_slice_of_the_mask_is_the_mask_of_the_slice():
    keys = step_keys(7, 3, ["probabilities"], CPU)
    rows, heads, queries, keys_at = (premix(torch.arange(n)) for n in (6, 4, 9, 9))
    whole = keep(keys[0], [rows, heads, queries, keys_at], 0.3)
    part = keep(keys[0], [rows[2:5], heads[1:3], queries[4:], keys_at[:7]], 0.3)
    assert torch.equal(part, whole[2:5, 1:3, 4:, :7])


def test_keys_of_a_long_run_do_not_collide():
    sites = [f"layers.{i}" for i in range(40)]
    keys = torch.cat([step_keys(1, step, sites, CPU) for step in range(2500)])
    assert len(torch.unique(keys, dim=0)) == len(keys)


def test_both_words_of_a_key_count():
    indices = [premix(torch.arange(size)) for size in SIZES]
    base = keep(torch.tensor([5, 9], dtype=torch.int32), indices, 0.2)
    for other in ([6, 9], [5, 10]):
        assert abs(z_of_correlation(base, keep(torch.tensor(other, dtype=torch.int32), indices, 0.2))) < 4.5


def test_kept_values_are_scaled_and_gradients_masked():
    x = torch.ones(4, 5, 6, requires_grad=True)
    y = Masks(step_keys(1, 1, ["a"], CPU), torch.arange(4), 0.25).drop(x, 0)
    y.sum().backward()
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(x.grad, y.detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_cuda_gives_the_same_mask():
    key = step_keys(1, 1, ["a"], CPU)[0]
    indices = [premix(torch.arange(n)) for n in SIZES]
    on_gpu = keep(key.cuda(), [i.cuda() for i in indices], 0.2)
    assert torch.equal(on_gpu.cpu(), keep(key, indices, 0.2))
