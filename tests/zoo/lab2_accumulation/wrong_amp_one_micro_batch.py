"""Puts a single micro-batch inside no_sync(), as if another one came.

loses: accum_amp_update
"""


# %% replaces="task5_amp_step"
def amp_step(
    ddp_model: DistributedDataParallel,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    dtype: torch.dtype,
    max_norm: float | None = None,
) -> None:
    k = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        context = ddp_model.no_sync() if i < max(1, k - 1) else contextlib.nullcontext()
        with context:
            with torch.autocast(x.device.type, dtype=dtype):
                loss = loss_fn(ddp_model(x), y) / k
            scaler.scale(loss).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
