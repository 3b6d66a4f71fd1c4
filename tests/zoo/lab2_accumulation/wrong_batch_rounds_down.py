"""Rounds the number of micro-batches down, and raises only if there is none.

loses: accum_batch_size
"""


# %% replaces="task6_batch_size"
def effective_batch_size(micro_batch_size, accumulation_steps, world_size):
    return micro_batch_size * accumulation_steps * world_size


def accumulation_steps_for(global_batch_size, micro_batch_size, world_size):
    steps = global_batch_size // (micro_batch_size * world_size)
    if steps < 1:
        raise ValueError("too small")
    return steps


def scaled_lr(base_lr, base_batch_size, batch_size):
    return base_lr * batch_size / base_batch_size
