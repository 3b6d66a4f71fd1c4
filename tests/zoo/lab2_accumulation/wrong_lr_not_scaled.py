"""Keeps the learning rate of the recipe, whatever the batch size.

loses: accum_batch_size
"""


# %% replaces="task6_batch_size"
def effective_batch_size(micro_batch_size, accumulation_steps, world_size):
    return micro_batch_size * accumulation_steps * world_size


def accumulation_steps_for(global_batch_size, micro_batch_size, world_size):
    steps, rest = divmod(global_batch_size, micro_batch_size * world_size)
    if rest or steps < 1:
        raise ValueError("no whole number of micro-batches gives this batch")
    return steps


def scaled_lr(base_lr, base_batch_size, batch_size):
    return base_lr
