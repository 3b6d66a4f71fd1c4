"""Flushes the last group, but with weight 1/k for each batch, as if it were full.

loses: accum_tail
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    steps = 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches, start=1):
        (loss_fn(model(x), y) / accumulation_steps).backward()
        if i % accumulation_steps == 0 or i == len(batches):
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
    return steps
