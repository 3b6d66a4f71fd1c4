"""All ranks meet, but before rank 0 builds.

loses: debug_once
"""


# %% replaces="mend_9"
def prepare_once(build, load):
    dist.barrier()
    if dist.get_rank() == 0:
        build()
    return load()
