"""The learning rate of a step: a pure function of the config and the step's number, so that nothing is to be saved."""

import math

from shardlab.config.schema import ConstantConfig, CosineConfig, StepConfig


def learning_rate(
    scheduler: ConstantConfig | StepConfig | CosineConfig, lr: float, step: int, epoch_steps: int, total_steps: int
) -> float:
    """The rate of one step.

    lr: the config's; step: 1..total_steps; epoch_steps: steps in a whole epoch

    A cosine follows Loshchilov and Hutter 2017 without restarts: half a period from lr at the end of the warm-up
    to lr * final_ratio at the last step.
    """
    match scheduler:
        case StepConfig():
            return lr * scheduler.gamma ** ((step - 1) // epoch_steps // scheduler.every_epochs)
        case CosineConfig():
            if step <= scheduler.warmup_steps:
                return lr * step / scheduler.warmup_steps
            done = (step - scheduler.warmup_steps) / max(1, total_steps - scheduler.warmup_steps)
            floor = scheduler.final_ratio
            return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
        case _:
            return lr
