"""cleanup() leaves the process group also where there is none, which torch refuses.

loses: setup
"""


# %% replaces="task1_setup"
def setup_distributed():
    local_rank = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpus else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def cleanup():
    dist.destroy_process_group()
