"""Makes one large batch of the micro-batches in every task, so nothing is ever accumulated.

loses: accum_unequal, accum_memory, accum_steps, accum_ddp_collectives, accum_ddp_backward,
    accum_ddp_time, accum_token_gradients, accum_amp_update
misses: one-batch-at-a-time
because: it is the fault of each task
says: accum_memory activations of more than two micro-batches at once
says: accum_ddp_backward each micro-batch goes forward and backward once
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.item()


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    batches, steps = list(batches), 0
    optimizer.zero_grad()
    for first in range(0, len(batches), accumulation_steps):
        group = batches[first : first + accumulation_steps]
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        loss_fn(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        steps += 1
    return steps


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss = loss_fn(ddp_model(x), y)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    longest = max(targets.shape[1] for _, targets in micro_batches)

    def together(parts, value):
        pad = nn.functional.pad
        return torch.cat([pad(x, (0, longest - x.shape[1]), value=value) for x in parts])

    tokens = together([tokens for tokens, _ in micro_batches], 0)
    targets = together([targets for _, targets in micro_batches], IGNORED)
    count = (targets != IGNORED).sum()
    total = count.clone()
    dist.all_reduce(total)
    loss = loss_fn(ddp_model(tokens), targets) * (count * dist.get_world_size() / total)
    loss.backward()
    mean = loss.detach()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


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
