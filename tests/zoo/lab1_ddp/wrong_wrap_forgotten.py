"""Moves the model to the device and broadcasts its weights, but never wraps it.

loses: wrap_model
"""


# %% replaces="task2_wrap"
def wrap_model(model, device):
    model = model.to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    return model
