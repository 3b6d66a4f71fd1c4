"""Averages gradients, over two ranks, however many there are.

loses: debug_step_mean
class: example
"""


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    optimizer.step()
