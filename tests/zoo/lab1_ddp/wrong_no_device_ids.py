"""Never passes device_ids.

loses: wrap_model
"""

# ruff: noqa: F821


# %% replaces="task2_wrap"
def wrap_model(model, device):
    return DistributedDataParallel(model.to(device))
