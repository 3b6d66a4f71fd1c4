"""Joins with LOCAL_RANK and LOCAL_WORLD_SIZE: each node has a group of its own.

loses: setup
"""


# %% replaces="task1_setup"
def setup_distributed():
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if use_cuda else "gloo",
            rank=local_rank,
            world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        )
    return dist.get_rank(), dist.get_world_size(), device


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()
