"""Never passes device_ids.

loses: wrap_model
says: wrap_model on cuda:1, expected device_ids=
"""


# %% replaces="task2_wrap"
def wrap_model(model, device):
    return DistributedDataParallel(model.to(device))
