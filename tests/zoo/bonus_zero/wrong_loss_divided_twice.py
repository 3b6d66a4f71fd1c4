"""Divides the loss by the number of ranks, and so does the optimiser.

loses: zero_train
class: example
"""


# %% replaces="task8_train"
def train_step(model, optimizer, micro_batches, loss_fn, max_norm):
    total = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) / len(micro_batches)
        (loss / dist.get_world_size()).backward()
        optimizer.reduce()
        total += loss.item()
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm
