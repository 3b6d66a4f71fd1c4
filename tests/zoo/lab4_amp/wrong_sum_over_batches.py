"""Adds up the gradients of a step's batches.

loses: amp_loop_accumulates
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
    losses = []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        loss_sum = 0.0
        for x, y in batches[start : start + accumulate]:
            with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()  # DDP averages the scaled gradients in here
            loss_sum += loss.item() / accumulate

        if max_norm is not None:
            scaler.unscale_(optimizer)  # the threshold is meant for the true gradient
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        taken = scaler.step(optimizer)
        scaler.update()
        if taken and scheduler is not None:
            scheduler.step()
        losses.append(loss_sum)
    return losses
