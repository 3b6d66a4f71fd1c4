"""Takes nccl as soon as a GPU is visible, though ranks would have to share it.

loses: setup
"""


# %% replaces="task1_setup"
def setup_distributed():
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()
