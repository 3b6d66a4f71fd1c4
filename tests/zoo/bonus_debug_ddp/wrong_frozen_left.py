"""Sends the buffers, but only those parameters that are trained.

loses: debug_broadcast_frozen
"""


# %% replaces="mend_6"
def broadcast_model(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
