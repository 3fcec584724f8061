"""What a fresh rank does before it can train: threads, device, determinism, and meeting the other ranks."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab.config.schema import Device, RuntimeConfig
from shardlab.training.place import Place


def prepare_device(runtime: RuntimeConfig, place: Place) -> torch.device:
    """Set this process up as the config says; returns its device.

    Same config, same numbers: on CUDA the deterministic kernels are chosen, and cuBLAS needs a fixed workspace
    for that, named before the first use of the GPU.
    """
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    if runtime.device is not Device.cuda:
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", place.rank if place.local_rank is None else place.local_rank)
    torch.cuda.set_device(device)
    return device


def meet(place: Place, device: torch.device, timeout: float) -> None:
    """Join the other ranks of the run: nccl on GPUs, gloo on CPUs. One rank alone needs nobody.

    timeout: seconds that a collective may wait
    """
    if place.ranks == 1:
        return
    if place.interface is not None and Path("/sys/class/net", place.interface).exists():
        # Left alone, gloo asks for the host's name, which may resolve to nothing, or to an address of this host's own.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=timeout),
        # With it nccl connects at once, the axes' groups too. Connected at its first call, a group would want all its
        # ranks in that call, and the first turn of a pipeline has two of them.
        device_id=device if device.type == "cuda" else None,
    )


def device_name(device: torch.device) -> str:
    """For the record: the GPU's model, or 'cpu'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point so far: torch's allocations on a GPU, the whole process's memory on a CPU.

    On a CPU that includes the code itself (about 0.2 GB, most of it shared between the ranks).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
