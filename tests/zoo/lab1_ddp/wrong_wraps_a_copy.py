"""Wraps a deep copy: the model that was passed is never trained.

loses: wrap_model
"""


# %% replaces="task2_wrap"
def wrap_model(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    model = copy.deepcopy(model).to(device)
    if device.type == "cuda":
        return DistributedDataParallel(model, device_ids=[device.index])
    return DistributedDataParallel(model)
