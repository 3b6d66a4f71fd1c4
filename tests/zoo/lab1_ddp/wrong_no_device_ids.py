"""Never passes device_ids.

loses: wrap_model
"""


# %% replaces="task2_wrap"
def wrap_model(model, device):
    return DistributedDataParallel(model.to(device))
