"""Steps the schedule with every batch: the learning rate falls k times too fast.

loses: accum_schedule
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
        if i == first + size - 1:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        if scheduler is not None:
            scheduler.step()
    return steps
