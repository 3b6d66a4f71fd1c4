"""A world of one on every rank: nothing is ever sent.

base: reference
passes: everything but setup
status: setup WRONG
"""


# %% replaces="task1_setup"
def setup_distributed():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")


def cleanup():
    pass
