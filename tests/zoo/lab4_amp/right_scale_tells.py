"""Learns from the scale whether the step was taken; divides gradients, not losses; clips by hand.

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
):
    losses = []
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    for group in groups:
        for p in params:
            p.grad = None
        seen = []
        for x, y in group:
            with torch.amp.autocast(x.device.type, dtype=dtype, enabled=bool(dtype)):
                prediction = model(x)
                seen.append(loss_fn(prediction, y))
            scaler.scale(seen[-1]).backward()
        scaler.unscale_(optimizer)
        for p in params:
            p.grad /= accumulate
        if max_norm is not None:
            norm = torch.cat([p.grad.flatten() for p in params]).norm().item()
            if norm > max_norm:
                for p in params:
                    p.grad *= max_norm / norm
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and scaler.get_scale() >= before:
            scheduler.step()
        losses.append(sum(loss.item() for loss in seen) / accumulate)
    return losses
