"""Clips after each backward, so the first batches of a group are clipped several times.

loses: accum_clip
class: example
says: accum_clip clip the accumulated gradient once
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    n, steps = len(batches), 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        first = i // accumulation_steps * accumulation_steps
        size = min(accumulation_steps, n - first)
        (loss_fn(model(x), y) / size).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if i == first + size - 1:
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
    return steps
