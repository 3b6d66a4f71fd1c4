"""Clips scaled gradients to a scaled threshold; uses no_sync; clears gradients last.

loses: nothing
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
    losses, parts = [], []
    model.zero_grad()
    for number, (x, y) in enumerate(batches, start=1):
        last = number % accumulate == 0
        precision = contextlib.nullcontext()
        if dtype is not None:
            precision = torch.autocast(device_type=x.device.type, dtype=dtype)
        with contextlib.nullcontext() if last else model.no_sync():
            with precision:
                loss = loss_fn(model(x), y)
            scaler.scale(loss / accumulate).backward()
        parts.append(loss.detach())
        if not last:
            continue
        if max_norm is not None:
            limit = max_norm * scaler.get_scale()
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if scaler.step(optimizer) and scheduler:
            scheduler.step()
        scaler.update()
        model.zero_grad()
        losses.append(torch.stack(parts).mean().item())
        parts = []
    return losses
