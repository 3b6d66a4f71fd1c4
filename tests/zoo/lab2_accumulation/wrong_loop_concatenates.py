"""Puts the k batches of a step into one large batch.

loses: accum_steps
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    batches, steps = list(batches), 0
    optimizer.zero_grad()
    for first in range(0, len(batches), accumulation_steps):
        group = batches[first : first + accumulation_steps]
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        loss_fn(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        steps += 1
    return steps
