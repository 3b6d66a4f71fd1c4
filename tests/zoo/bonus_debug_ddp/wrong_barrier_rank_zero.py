"""Takes the load into the branches, and leaves the barrier with rank 0.

loses: debug_once
class: example
"""


# %% replaces="mend_9"
def prepare_once(build, load):
    if dist.get_rank() == 0:
        build()
        dist.barrier()
        return load()
    return load()
