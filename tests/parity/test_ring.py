"""The ring written out (parallel/ring.py) against torch's own collectives, and what a textbook says of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.launch.ranks import run_ranks
from shardlab.parallel.axis import Axis, all_reduce_bytes, part_bytes
from shardlab.parallel.mesh import Mesh, connect
from shardlab.training.device import meet
from shardlab.training.place import Place

CPU = torch.device("cpu")
SIZES = [(1,), (2,), (7,), (10,), (3, 5, 7), (1, 1001)]
"""Of tensors: smaller than the ranks, odd, and of several dims."""


def spied(axis: Axis) -> tuple[Axis, set[int]]:
    """The axis with a ring, and the ranks that it has talked to."""
    peers: set[int] = set()

    class Spied(Axis):
        def exchange(self, sends, receives, kind="send"):
            sends, receives = list(sends), list(receives)
            peers.update(peer for _, peer in (*sends, *receives))
            return super().exchange(sends, receives, kind)

    return Spied(axis.name, axis.rank, axis.ranks, axis.group, ring=True), peers


def numbers(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    """Others on each rank, the same in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def ring(place: Place) -> dict[str, object]:
    """What each collective gives beside torch's, whom it talks to, what it sends, and the sums' bits."""
    meet(place, CPU, 60.0)
    plain = connect(Mesh(replicate=place.ranks), place.rank, "cpu", 60.0).axes["replicate"]
    axis, peers = spied(plain)
    apart: dict[str, float] = {}
    sent: dict[str, bool] = {}
    sums: list[bytes] = []
    for shape in SIZES:
        for dtype in (torch.float32, torch.float64):
            case = f"{shape} {dtype}"
            own = numbers(shape, place.rank, dtype)
            itemsize, ranks = own.element_size(), place.ranks

            def note(kind: str, a: Tensor, b: Tensor, expected: int, case: str = case) -> None:
                assert f"{kind} {case}" not in apart
                apart[f"{kind} {case}"] = float((a - b).abs().max()) / torch.finfo(a.dtype).eps
                sent[f"{kind} {case}"] = axis.sent.pop(kind) == expected

            mine, theirs = own.clone(), own.clone()
            axis.start_sum(mine).wait()
            dist.all_reduce(theirs, group=plain.group)
            padded = -(-own.numel() // ranks) * ranks * itemsize
            note("all_reduce", mine, theirs, 2 * (ranks - 1) * padded // ranks)
            assert 2 * (ranks - 1) * padded // ranks == all_reduce_bytes(own.numel(), itemsize, ranks)
            sums.append(mine.numpy().tobytes())

            whole = numbers((ranks * own.numel(),), place.rank, dtype)
            mine, theirs = torch.empty(own.numel(), dtype=dtype), torch.empty(own.numel(), dtype=dtype)
            dist.reduce_scatter_single(theirs, whole.clone(), group=plain.group)
            axis.start_reduce_scatter(mine, whole).wait()
            expected = (ranks - 1) * own.numel() * itemsize
            note("reduce_scatter", mine, theirs, expected)

            mine, theirs = (torch.empty(ranks * own.numel(), dtype=dtype) for _ in range(2))
            axis.start_all_gather(mine, own.flatten()).wait()
            dist.all_gather_single(theirs, own.flatten(), group=plain.group)
            note("all_gather", mine, theirs, expected)
            assert expected == part_bytes(ranks * own.numel(), itemsize, ranks)
            in_place = torch.zeros_like(mine)  # own may be the gathered tensor's own part
            part = in_place[place.rank * own.numel() :][: own.numel()].copy_(own.flatten())
            axis.start_all_gather(in_place, part).wait()
            note("all_gather", in_place, theirs, expected, f"in place {case}")
    return {"apart": apart, "sent": sent, "sums": sums, "peers": peers}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_ring_gives_what_torch_gives_and_talks_to_neighbours(ranks, tmp_path):
    found = run_ranks("test_ring:ring", (), ranks, log_dir=tmp_path)
    for rank, each in enumerate(found):
        assert len(each["apart"]) == 4 * 2 * len(SIZES)
        for case, units_of_rounding in each["apart"].items():
            assert units_of_rounding == 0 if "gather" in case else units_of_rounding < 16, case
        assert [case for case, right in each["sent"].items() if not right] == []
        assert each["peers"] == {(rank - 1) % ranks, (rank + 1) % ranks}
        assert each["sums"] == found[0]["sums"], "the same bits everywhere"
