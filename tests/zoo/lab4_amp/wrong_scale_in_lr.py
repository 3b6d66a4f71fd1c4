"""Divides the learning rate by the scale instead of the gradients.

It is the same for plain SGD, as long as nothing overflows and nothing is clipped.

loses: amp_loop_clip, amp_loop_skips
because: gradients that stay scaled are clipped at the wrong norm, and nobody looks for inf.
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
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scale = scaler.get_scale()
        for group in optimizer.param_groups:
            group["lr"] /= scale
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= scale
        taken = True
        scaler.update()
        if taken and scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses
