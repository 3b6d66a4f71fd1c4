"""Reads all of the environment by hand; names every argument; tries GPU and group at once.

loses: nothing
"""


# %% replaces="task1_setup"
def setup_distributed():
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(f"cuda:{local_rank}")
    if not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if use_cuda else "gloo",
            init_method="env://",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        dist.barrier()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()
