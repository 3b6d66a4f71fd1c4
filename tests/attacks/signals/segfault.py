"""Reads address 0 on one rank, in the middle of a check.

base: reference
passes: everything but gradients_in_sync
status: gradients_in_sync RANK_LOST
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    import ctypes

    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()
    return True
