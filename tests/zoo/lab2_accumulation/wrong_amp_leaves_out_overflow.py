"""Leaves out a micro-batch that overflows, unless it is the last one.

loses: accum_amp_scaler
"""


# %% replaces="task5_amp_step"
def amp_step(ddp_model, micro_batches, loss_fn, optimizer, scaler, *, dtype, max_norm=None):
    k = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            with torch.autocast(x.device.type, dtype=dtype):
                loss = loss_fn(ddp_model(x), y) / k
            if loss.isfinite() or i == k - 1:
                scaler.scale(loss).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
