"""Wraps the model on the CPU, and moves the wrapper afterwards.

loses: wrap_model
"""


# %% replaces="task2_wrap"
def wrap_model(model, device):
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids).to(device)
