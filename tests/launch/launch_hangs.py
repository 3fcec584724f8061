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


def beat_seldom(place: Place, ready: Path) -> int:
    """Beat every three seconds; when it is ready, the launcher has seen its last beat and the next is yet to come."""
    beat()
    time.sleep(1)
    (ready / f"{os.getpid()}.ready").touch()
    for _ in range(2):
        time.sleep(2)
        beat()
    return place.rank


def beat_for(place: Place, seconds: float) -> int:
    """Beat five times a second."""
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


def beats(place: Place, config: Config, run_dir: Path, data_dir: Path) -> dict[str, int]:
    """How often a rank beats in each part of a training; three batches are evaluated."""
    import torch

    from shardlab.data.dataset import open_dataset
    from shardlab.parallel.mesh import connect, mesh_of
    from shardlab.training import best, build, evaluation, loop, passes, pulse, step
    from shardlab.training.device import meet

    cpu, counted = torch.device("cpu"), {}

    def count(part, work, *arguments):
        before = pulse._count[0]
        result = work(*arguments)
        counted[part] = pulse._count[0] - before
        return result

    meet(place, cpu, 100.0)
    mesh = connect(mesh_of(config.strategy), place.rank, "cpu", 100.0)
    training = count("build", build.build, config, mesh, cpu, open_dataset(data_dir, config.dataset))
    counted["parameters"] = len(training.held)
    batches = [batch for *_, batch in loop.steps(training, 2, 2)]
    count("step", step.train_step, training, batches[0], 1, 0.1)
    passes.beat = lambda: None  # what is left are those of backward passes
    if training.pipeline is None:
        counted["backward"] = counted["step"]
    else:
        passes._beat_before_backward = lambda _: beat()
        count("backward", step.train_step, training, batches[1], 2, 0.1)
    passes.beat = beat
    count("evaluation", evaluation.evaluate, training, "val", 3)
    count("save", best.save_best, training, run_dir)
    count("load", best.load_best, training, run_dir)
    return counted
