"""torch's own DDP behind every contract that it fits, even where the case does without it.

loses: nothing
class: example
"""


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    ddp_model = in_ddp(model)
    optimizer.zero_grad()
    loss_fn(ddp_model(x), y).backward()
    optimizer.step()


# %% replaces="mend_6"
def broadcast_model(model):
    in_ddp(model)  # sends parameters and buffers from rank 0 when it wraps


# %% replaces="mend_9"
def prepare_once(build, load):
    done = [dist.get_rank() == 0 and build()]
    dist.broadcast_object_list(done, src=0)
    return load()
