"""Gathers the numbers of tokens of all ranks as objects, and computes the loss in float64.

The last micro-batch has code of its own; clips by hand with foreach operations.

loses: nothing
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    own = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    total = sum(map(sum, everyone))
    reported = []
    for i, (tokens, targets) in enumerate(micro_batches):
        ddp_model.require_backward_grad_sync = i == len(micro_batches) - 1
        output = ddp_model(tokens)
        loss = loss_fn(output, targets).double() * own[i]
        reported.append(loss.item())
        (loss * len(everyone) / total).backward()
    dist.all_gather_object(everyone, sum(reported))
    return sum(everyone) / total


# %% replaces="task5_amp_step"
def amp_step(ddp_model, micro_batches, loss_fn, optimizer, scaler, *, dtype, max_norm=None):
    k = len(micro_batches)
    context = contextlib.ExitStack()
    context.enter_context(ddp_model.no_sync())
    for x, y in micro_batches[:-1]:
        with torch.autocast(x.device.type, dtype):
            loss = loss_fn(ddp_model(x), y)
        scaler.scale(loss).div(k).backward()
    context.close()
    x, y = micro_batches[-1]
    with torch.autocast(x.device.type, dtype):
        loss = loss_fn(ddp_model(x), y)
    scaler.scale(loss).div(k).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        grads = [p.grad for p in ddp_model.parameters()]
        norm = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    scaler.step(optimizer)
    scaler.update()


# %% replaces="task6_batch_size"
effective_batch_size = lambda micro, k, ranks: micro * k * ranks  # noqa: E731


def accumulation_steps_for(global_batch_size, micro_batch_size, world_size):
    k, rest = divmod(global_batch_size, micro_batch_size * world_size)
    if rest:
        raise ValueError("does not divide")
    return k


def scaled_lr(base_lr, base_batch_size, batch_size):
    return torch.tensor(base_lr, dtype=torch.float64) * (batch_size / base_batch_size)
