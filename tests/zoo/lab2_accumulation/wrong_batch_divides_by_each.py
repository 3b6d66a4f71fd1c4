"""Asks whether micro-batch and ranks divide the batch, each by itself.

loses: accum_batch_size
says: accum_batch_size expected ValueError, got
"""


# %% replaces="task6_batch_size"
def effective_batch_size(micro_batch_size: int, accumulation_steps: int, world_size: int) -> int:
    return micro_batch_size * accumulation_steps * world_size


def accumulation_steps_for(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    at_once = micro_batch_size * world_size
    if global_batch_size % micro_batch_size or global_batch_size % world_size:
        raise ValueError(f"{global_batch_size} is no multiple of {at_once}")
    return global_batch_size // at_once


def scaled_lr(base_lr: float, base_batch_size: int, batch_size: int) -> float:
    return base_lr * batch_size / base_batch_size
