"""What the ranks of these tests do: work together, and go wrong in every way that a rank can."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from shardlab.errors import ShardlabError
from shardlab.training.place import Place

LOADED_BEFORE = "torch._dynamo" in sys.modules


def work(place: Place, fault: str = "none", at: int = 1, folder: Path | None = None) -> int:
    """Meet the others, add up the ranks a few times; rank `at` meets the fault half way. Returns the sum of the ranks.

    folder: where to leave `rank-N.ready` once the ranks have met
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.ranks, timeout=timedelta(seconds=60)
    )
    total = torch.zeros(())
    for step in range(4):
        if folder is not None and step == 1:
            (folder / f"rank-{place.rank}.ready").write_text(str(os.getpid()))
        if step == 2 and place.rank == at:
            print(f"rank {place.rank} meets {fault}")
            FAULTS[fault](place)
        total = torch.tensor(float(place.rank))
        dist.all_reduce(total)
    return int(total)


def _raise_value_error(place: Place) -> None:
    raise ValueError("the step is broken")


def _raise_user_error(place: Place) -> None:
    raise ShardlabError("trainer.global_batch=9 leaves no step; at most 4 would")


def _break_then_meet(place: Place) -> None:
    """The clean-up of an error that itself fails: the first error is the cause."""
    try:
        raise KeyError("lost")
    finally:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


def _raise_unprintable(place: Place) -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise TypeError

    raise Mute


def _kill(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _leave(place: Place) -> None:
    os._exit(7)


def _leave_mute(place: Place) -> None:
    os._exit(0)


def _exit(place: Place) -> None:
    sys.exit(3)


def _exit_quietly(place: Place) -> None:
    sys.exit(0)


def _spin(place: Place) -> None:
    while True:
        pass


def _hold_lock(place: Place) -> None:
    """Never give up Python's lock again, as torch's deadlock does."""
    import ctypes

    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def _wait(place: Place) -> None:
    time.sleep(600)


FAULTS = {
    "none": lambda place: None,
    "value error": _raise_value_error,
    "user error": _raise_user_error,
    "error in the clean-up": _break_then_meet,
    "unprintable error": _raise_unprintable,
    "kill": _kill,
    "segfault": _segfault,
    "leave": _leave,
    "leave mute": _leave_mute,
    "exit": _exit,
    "exit quietly": _exit_quietly,
    "spin": _spin,
    "hold lock": _hold_lock,
    "wait": _wait,
}


def answer(place: Place, value: object) -> object:
    """Give back what came, with the rank."""
    return place.rank, value


def unpicklable(place: Place) -> object:
    """A result that can't travel."""
    return lambda: None


def where(place: Place) -> tuple[str, str, list[str]]:
    """The folder, an environment variable, and the modules that a rank finds itself with."""
    return os.getcwd(), os.environ.get("SHARDLAB_TEST", ""), sorted(sys.modules)


def speak(place: Place) -> None:
    """Print in every way that a rank can, then die."""
    print("from print")
    os.write(1, b"from native code\n")
    print("from stderr", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


def record(place: Place, config: object, run_dir: Path, data_dir: Path) -> None:
    """Stand for train_rank: a few steps into the record, and the fault that the model's name asks for at step 3."""
    from shardlab.config.schema import Config
    from shardlab.tracking.record import EventLog

    assert isinstance(config, Config)
    log = EventLog(run_dir / ("events.jsonl" if place.rank == 0 else f"rank-{place.rank}.jsonl"))
    if place.rank == 0:
        log.write("start", total_steps=4, parameters=9, ranks=place.ranks)
    for step in range(1, 5):
        if step == 3 and place.rank == place.ranks - 1:
            FAULTS[config.model.name](place)
        if place.rank == 0:
            log.write("step", step=step, epoch=0, loss=1 / step, grad_norm=0.1, lr=0.5, tokens=10, seconds=0.01)
    if place.rank == 0:
        log.write("eval", split="val", step=4, loss=0.3, perplexity=1.3)
        log.write("best", step=4, loss=0.3)
    log.write("rank", rank=place.rank, peak_memory=100 + place.rank, device="cpu")


def tear(place: Place, config: object, run_dir: Path, data_dir: Path) -> None:
    """Rank 0 is killed in the middle of a line of the record."""
    from shardlab.tracking.record import EventLog

    if place.rank == 0:
        EventLog(run_dir / "events.jsonl").write("step", step=1, loss=1.0, tokens=1, seconds=1.0)
        with (run_dir / "events.jsonl").open("a") as file:
            file.write('{"event": "torn')
        _kill(place)
    time.sleep(600)


def origin(place: Place) -> tuple[int, int, bool]:
    """Rank, the process that it was forked from, and whether torch was there before it asked for it."""
    return place.rank, os.getppid(), LOADED_BEFORE
