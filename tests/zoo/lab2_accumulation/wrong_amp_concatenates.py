"""Puts all micro-batches into one large batch in half precision.

loses: accum_amp_update
"""


# %% replaces="task5_amp_step"
def amp_step(ddp_model, micro_batches, loss_fn, optimizer, scaler, *, dtype, max_norm=None):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    with torch.autocast(x.device.type, dtype=dtype):
        loss = loss_fn(ddp_model(x), y)
    scaler.scale(loss).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
