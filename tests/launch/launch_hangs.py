"""What ranks do in the tests of silence: they train, beat or wait, and one of them hangs."""

import os
import signal
import time
from pathlib import Path

from launch_faults import FAULTS

from shardlab.config.schema import Config
from shardlab.training.place import Place
from shardlab.training.pulse import beat


def _stop(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS = {**FAULTS, "stop": _stop}


def train(place: Place, fault: str, at: int, config: Config, run_dir: Path, data_dir: Path) -> None:
    """train_rank, whose rank `at` meets a fault in its second step."""
    from shardlab.training import loop

    step_of_loop = loop.train_step

    def train_step(training, batch, step, lr):
        if step == 2 and place.rank == at:
            HANGS[fault](place)
        return step_of_loop(training, batch, step, lr)

    loop.train_step = train_step
    loop.train_rank(place, config, run_dir, data_dir)


def hang(place: Place, fault: str, at: int) -> None:
    """Rank `at` meets a fault while the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.ranks)
    if place.rank == at:
        HANGS[fault](place)
    dist.all_reduce(torch.zeros(()))


def hang_alone(place: Place, at: int) -> None:
    """Rank `at` hangs while the others go on working."""
    while True:
        time.sleep(0.1)
        if place.rank != at:
            beat()


def mismatch(place: Place) -> None:
    """Two ranks wait for each other for ever: each wants to receive first."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.ranks)
    if place.rank == 0:
        for _ in range(20):
            time.sleep(0.1)
            beat()
    dist.recv(torch.zeros(()), src=1 - place.rank)


def work_alone(place: Place, seconds: float) -> float:
    """Rank 0 works, and beats; the others wait for it without a beat."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.ranks)
    beat()
    if place.rank == 0:
        beat_for(place, seconds)
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total)


def beat_for(place: Place, seconds: float, ready: Path | None = None) -> int:
    """Beat five times a second."""
    if ready is not None:
        (ready / f"{os.getpid()}.ready").touch()
    for _ in range(int(seconds * 5)):
        time.sleep(0.2)
        beat()
    return place.rank


def cores_of_all_threads(place: Place) -> list[set[int]]:
    """The cores that each thread of a rank may use, those of torch included."""
    import torch

    torch.randn(400, 400) @ torch.randn(400, 400)
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


def stacks_are_asked(place: Place, seconds: float) -> float:
    """Collectives for a while, in which whoever likes may ask for stacks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.ranks)
    total, going = torch.zeros(()), torch.ones(())
    deadline = time.monotonic() + seconds
    while going:
        total = torch.ones(1000)
        dist.all_reduce(total)
        going = torch.tensor(float(time.monotonic() < deadline))
        dist.broadcast(going, src=0)
    return float(total[0])
