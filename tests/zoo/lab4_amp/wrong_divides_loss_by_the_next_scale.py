"""Divides the scaled loss by the scale after update().

loses: amp_loop_update
"""


# %% replaces="task3_loop"
def train_amp(
    model: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    *,
    dtype: torch.dtype | None,
    max_norm: float | None = None,
    accumulate: int = 1,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """Trains `model` with mixed precision; returns the unscaled loss of each optimizer step."""
    history = []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        total = 0.0
        for x, y in batches[start : start + accumulate]:
            with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model(x), y)
            scaler.scale(loss / accumulate).backward()
            total += scaler.scale(loss).item()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        taken = scaler.step(optimizer)
        if taken and scheduler is not None:
            scheduler.step()
        scaler.update()
        history.append(total / accumulate / scaler.get_scale())
    return history
