"""The effective batch size without the number of ranks, and a number of steps that is rounded.

loses: accum_batch_size
"""


# %% replaces="task6_batch_size"
def effective_batch_size(micro_batch_size, accumulation_steps, world_size):
    return micro_batch_size * accumulation_steps


def accumulation_steps_for(global_batch_size, micro_batch_size, world_size):
    return max(1, global_batch_size // (micro_batch_size * world_size))


def scaled_lr(base_lr, base_batch_size, batch_size):
    return base_lr * batch_size / base_batch_size
