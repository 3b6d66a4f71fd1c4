"""Joins the process group without asking whether it is in one: a second call raises.

loses: setup
status: setup STUDENT_ERROR
"""


# %% replaces="task1_setup"
def setup_distributed():
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), device


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()
