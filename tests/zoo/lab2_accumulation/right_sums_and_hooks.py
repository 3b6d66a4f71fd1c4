"""Turns mean losses into sums; a hook on each parameter divides its gradient.

Over ranks: no_sync() around everything, then one all-reduce per parameter by hand. The epoch looks
one batch ahead and never asks for its length; the runs for each k train side by side.

loses: nothing
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    n = sum(y.shape[0] for _, y in micro_batches)
    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_hook(lambda grad: grad / n) for p in trained]
    shares = torch.zeros(len(micro_batches), dtype=torch.float64)
    for i, (x, y) in enumerate(micro_batches):
        loss_sum = loss_fn(model(x), y) * y.shape[0]
        loss_sum.backward()
        shares[i] = loss_sum.detach() / n
    for handle in handles:
        handle.remove()
    return shares.sum()


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    source, steps = iter(batches), 0
    batch = next(source)
    while batch is not None:
        optimizer.zero_grad()
        size = 0
        while batch is not None and size < accumulation_steps:
            x, y = batch
            loss_fn(model(x), y).backward()
            size += 1
            batch = next(source, None)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= size
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        steps += 1
    return steps


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    k, shares = len(micro_batches), []
    with ddp_model.no_sync():
        for x, y in micro_batches:
            share = loss_fn(ddp_model(x), y) / k
            share.backward()
            shares.append(share.detach())
    loss = sum(shares)
    # gloo has no AVG: divide first, then sum.
    grads = [p.grad for p in ddp_model.parameters()] + [loss]
    torch._foreach_div_(grads, dist.get_world_size())
    for grad in grads:
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
    return loss.item()


# %% replaces="task7_convergence"
def compare_convergence(
    make_model,
    train_step,
    x,
    y,
    *,
    global_batch_size,
    num_steps,
    accumulation_steps,
    rank,
    world_size,
):
    models = {k: make_model() for k in sorted(accumulation_steps)}
    curves = {k: [] for k in models}
    share = global_batch_size // world_size
    for step in range(num_steps):
        begin = step * global_batch_size + rank * share
        for k, model in models.items():
            size = share // k
            starts = range(begin, begin + share, size)
            micro_batches = [(x[a : a + size], y[a : a + size]) for a in starts]
            curves[k].append(train_step(model, micro_batches))
    return curves
