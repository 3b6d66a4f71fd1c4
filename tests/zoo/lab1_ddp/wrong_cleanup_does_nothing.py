"""cleanup() waits for the other ranks, and leaves nothing.

loses: setup
says: setup after cleanup() there is still a process group
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
    if dist.is_initialized():
        dist.barrier()
