"""The step for the left-over batches does not move the schedule on.

loses: accum_schedule
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    k, left = accumulation_steps, len(batches) % accumulation_steps
    steps = 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches, start=1):
        in_tail = i > len(batches) - left
        (loss_fn(model(x), y) / (left if in_tail else k)).backward()
        if i % k == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
    if left:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps
