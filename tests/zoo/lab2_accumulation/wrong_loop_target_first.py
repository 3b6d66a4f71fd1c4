"""Calls loss_fn(target, prediction): the same for the squared error, and for no other loss.

loses: accum_steps
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model: nn.Module,
    batches: DataLoader,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation_steps: int,
    max_norm: float | None = None,
    scheduler: LRScheduler | None = None,
) -> int:
    k = accumulation_steps
    n = len(batches)
    steps = 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        size = min(k, n - (i - i % k))
        loss = loss_fn(y, model(x)) / size
        loss.backward()
        if (i + 1) % k == 0 or i + 1 == n:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
    return steps
