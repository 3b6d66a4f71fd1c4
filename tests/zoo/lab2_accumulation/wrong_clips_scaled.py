"""Clips gradients that are still multiplied by the scale; unscale_ comes after.

loses: accum_amp_clip
"""


# %% replaces="task5_amp_step"
def amp_step(ddp_model, micro_batches, loss_fn, optimizer, scaler, *, dtype, max_norm=None):
    k = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            with torch.autocast(x.device.type, dtype=dtype):
                loss = loss_fn(ddp_model(x), y) / k
            scaler.scale(loss).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
