"""Enters no_sync() once through an ExitStack and leaves it before the last micro-batch.

Cuts the epoch into groups with a zip over an iterator.

loses: nothing
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    source, num_steps = iter(batches), 0
    while group := list(zip(range(accumulation_steps), source, strict=False)):
        optimizer.zero_grad(set_to_none=False)
        for _, (x, y) in group:
            loss_fn(model(x), y).div(len(group)).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=False)
        optimizer.step()
        num_steps += 1
        scheduler is None or scheduler.step()
    return num_steps


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    with contextlib.ExitStack() as stack:
        stack.enter_context(ddp_model.no_sync())
        losses = []
        for left, (x, y) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            if left == 0:
                stack.close()
            losses.append(loss_fn(ddp_model(x), y))
            losses[-1].div(len(micro_batches)).backward()
    mean = torch.stack(losses).detach().mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
