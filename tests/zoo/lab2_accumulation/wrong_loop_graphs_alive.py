"""Adds up the losses of a group, and calls backward once per step.

loses: accum_steps
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    losses, steps = [], 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        losses.append(loss_fn(model(x), y))
        if len(losses) < accumulation_steps and i < len(batches) - 1:
            continue
        torch.stack(losses).mean().backward()
        losses = []
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        steps += 1
    return steps
