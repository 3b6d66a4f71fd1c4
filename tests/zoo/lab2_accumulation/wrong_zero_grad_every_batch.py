"""Clears the gradients before each batch, as in a loop without accumulation.

loses: accum_steps
class: example
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    n, steps = len(batches), 0
    for i, (x, y) in enumerate(batches):
        first = i // accumulation_steps * accumulation_steps
        size = min(accumulation_steps, n - first)
        optimizer.zero_grad()
        (loss_fn(model(x), y) / size).backward()
        if i == first + size - 1:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            steps += 1
    return steps
