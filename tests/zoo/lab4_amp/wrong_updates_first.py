"""Updates the scale before the gradients are unscaled: they are divided by the next scale.

loses: amp_loop_update
class: example
"""


# %% replaces="task3_loop"
def train_amp(
    model,
    batches,
    loss_fn,
    optimizer,
    scaler,
    *,
    dtype,
    max_norm=None,
    accumulate=1,
    scheduler=None,
):
    losses = []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        total = 0.0
        for x, y in batches[start : start + accumulate]:
            with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model(x), y) / accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.update()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        taken = scaler.step(optimizer)
        if taken and scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses
