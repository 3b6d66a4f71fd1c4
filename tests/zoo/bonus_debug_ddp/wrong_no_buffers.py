"""Sends all parameters and forgets the buffers.

loses: debug_broadcast_buffers
class: example
"""


# %% replaces="mend_6"
def broadcast_model(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
