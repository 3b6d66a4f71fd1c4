"""Rank 1's process ends in the middle of a function.

loses: gradients_in_sync
status: gradients_in_sync RANK_LOST
class: example
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    if dist.get_rank() == 1:
        os._exit(3)
    for param in model.parameters():
        mean = param.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if (param.grad - mean).abs().max() > tol:
            return False
    return True
