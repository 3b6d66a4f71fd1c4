"""Losses stay tensors until the end; no_sync; a nullcontext for full precision; get_total_norm.

loses: nothing
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
    log_every=0,
):
    def precision(x):
        if dtype is None:
            return contextlib.nullcontext()
        return torch.amp.autocast(device_type=x.device.type, dtype=dtype)

    kept: list[torch.Tensor] = []
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)
    parts: list[torch.Tensor] = []
    for number, (x, y) in enumerate(batches, start=1):
        last = number % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with precision(x):
                loss = loss_fn(model(x), y)
            scaler.scale(loss / accumulate).backward()
        parts.append(loss.detach().float())
        if not last:
            continue
        scaler.unscale_(optimizer)
        if max_norm is not None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        if scaler.step(optimizer) and scheduler:
            scheduler.step()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        kept.append(torch.stack(parts).mean())
        parts.clear()
    return [float(loss) for loss in kept]
