"""Flushes after the loop without asking whether a batch is left: a step without a gradient.

loses: accum_steps
says: accum_steps Step only for a group
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    steps = 0
    k, n = accumulation_steps, len(batches)

    def step():
        nonlocal steps
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        steps += 1

    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        full = i < n // k * k
        (loss_fn(model(x), y) / (k if full else n % k)).backward()
        if (i + 1) % k == 0:
            step()
    step()
    return steps
