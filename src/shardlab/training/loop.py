"""A rank's whole life in a run: get ready, train and evaluate by turns, test the best model, say what it cost.

Rank 0 writes the run record; the others write what only they know. The launcher reads it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab.config.schema import Config
from shardlab.data.dataset import Batch, open_dataset
from shardlab.data.prepared import read_meta
from shardlab.data.rows import feed
from shardlab.models.cost import stage_layers
from shardlab.parallel.mesh import connect, mesh_of, name_of
from shardlab.tracking.record import EventLog
from shardlab.training.ask import is_pruned
from shardlab.training.best import load_best, save_best
from shardlab.training.build import Training, build
from shardlab.training.device import device_name, meet, peak_memory, prepare_device
from shardlab.training.evaluation import evaluate
from shardlab.training.learning_rate import learning_rate
from shardlab.training.length import run_length
from shardlab.training.place import Place
from shardlab.training.precision import set_products
from shardlab.training.pulse import beat, group_timeout
from shardlab.training.step import train_step

_kept: list[object] = []
"""Holds what must outlive the process group until the process leaves by os._exit: freed earlier, gloo may hang."""


def train_rank(place: Place, config: Config, run_dir: Path, data_dir: Path) -> None:
    """Train as one rank of a run. The launcher calls this in a fresh process, whose output goes to rank-N.log.

    Writes events.jsonl (rank 0) or rank-N.jsonl, and its part of checkpoints/best.safetensors.
    """
    device = prepare_device(config.runtime, place)
    set_products(config.precision.name, device)
    timeout = group_timeout(config.runtime.timeout)
    meet(place, device, timeout)
    mesh = connect(mesh_of(config.strategy), place.rank, device.type, timeout, config.strategy.reduce)
    beat()
    training = build(config, mesh, device, open_dataset(data_dir, config.dataset))
    _kept.append(training)
    log = EventLog(run_dir / ("events.jsonl" if place.rank == 0 else f"rank-{place.rank}.jsonl"))
    total_steps, epoch_steps = run_length(config, read_meta(data_dir))
    if place.rank == 0:
        log.write("start", **start_facts(training, total_steps, epoch_steps))
    train(training, log, run_dir, total_steps, epoch_steps)
    log.write("rank", **rank_facts(training, place))
    log.close()
    beat()
    mesh.wait()
    if place.ranks > 1:
        dist.destroy_process_group()


def train(training: Training, log: EventLog, run_dir: Path, total_steps: int, epoch_steps: int) -> None:
    """All steps, the evaluations between them, and the best model's test; a run that is pruned ends without it."""
    config = training.config
    trainer = config.trainer
    best, best_step = float("inf"), 0
    last = time.perf_counter()
    for step, epoch, batch in steps(training, total_steps, epoch_steps):
        lr = learning_rate(config.scheduler, config.optimizer.lr, step, epoch_steps, total_steps)
        result = train_step(training, batch, step, lr)
        now = time.perf_counter()
        if training.mesh.rank == 0:
            log.write(
                "step",
                step=step,
                epoch=epoch,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                tokens=batch.tokens,
                seconds=now - last,
                **result.of_precision,
            )
        if step == total_steps or step % (trainer.eval_every or epoch_steps) == 0:
            values = report(training, log, "val", step)
            loss = values["loss"]
            if loss < best or (step == total_steps and best_step == 0):  # a loss of NaN is no best, but a last resort
                best, best_step = loss, step
                save_best(training, run_dir)
                if training.mesh.rank == 0:
                    log.write("best", step=step, loss=loss)
            if is_pruned(training.mesh, training.device, step, values):
                if training.mesh.rank == 0:
                    log.write("pruned", step=step)
                return
            now = time.perf_counter()
        last = now
    if trainer.test:
        load_best(training, run_dir)
        report(training, log, "test", best_step)


def steps(training: Training, total_steps: int, epoch_steps: int) -> Iterator[tuple[int, int, Batch]]:
    """Yield (step from 1, epoch from 0, global batch) until total_steps."""
    config = training.config
    for epoch in range(-(-total_steps // epoch_steps)):
        first = epoch * epoch_steps
        batches = feed(
            training.dataset,
            "train",
            global_batch=config.trainer.global_batch,
            seed=config.seed,
            epoch=epoch,
            stop=min(epoch_steps, total_steps - first),
        )
        for number, batch in enumerate(batches, first + 1):
            yield number, epoch, batch


def report(training: Training, log: EventLog, split: str, step: int) -> dict[str, float]:
    """Evaluate on a split and write it down; returns the values. step: the one whose model this is."""
    started = time.perf_counter()
    values = evaluate(training, split, training.config.trainer.eval_batches)
    if training.mesh.rank == 0:
        log.write("eval", split=split, step=step, **values, seconds=time.perf_counter() - started)
    return values


def start_facts(training: Training, total_steps: int, epoch_steps: int) -> dict[str, object]:
    """What is known before the first step."""
    dataset, batch = training.dataset, training.config.trainer.global_batch
    return {
        "total_steps": total_steps,
        "epoch_steps": epoch_steps,
        "mesh": name_of(training.config.strategy),
        "ranks": training.mesh.mesh.ranks,
        "parameters": training.table.elements,
        "stages": stage_layers(training.config, training.shape, training.table),
        "vocab_size": training.shape.vocab_size,
        "dataset": {**dataset.facts, **{f"{s}_dropped": dataset.dropped(s, batch) for s in dataset.splits}},
        "fingerprint": dataset.fingerprint,
        "backend": dist.get_backend() if dist.is_initialized() else None,
    }


def rank_facts(training: Training, place: Place) -> dict[str, object]:
    """What only this rank knows: where it ran, the layers it held, and its elements of parameters."""
    return {
        "rank": place.rank,
        "pid": os.getpid(),
        "device": device_name(training.device),
        "threads": torch.get_num_threads(),
        "layers": [int(layer) for model in training.models.values() for layer in model.layers],
        "parameters": sum(parameter.numel() for _, parameter in training.held),
        "sent": {axis: dict(each.sent) for axis, each in training.mesh.axes.items() if each.sent},
        "peak_memory": peak_memory(training.device),
    }
