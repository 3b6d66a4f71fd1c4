"""Averages the weights after the step, over the right number of ranks. With SGD nobody notices.

loses: debug_step_adam
class: example
"""


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
