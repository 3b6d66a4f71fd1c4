"""Accumulates in float64 beside p.grad, with torch.autograd.grad, and reduces in float64.

loses: nothing
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    loss_sum, samples = 0.0, 0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        for total, grad in zip(sums, torch.autograd.grad(loss, params), strict=True):
            total += grad.double() * len(x)
        loss_sum += loss.item() * len(x)
        samples += len(x)
    for p, total in zip(params, sums, strict=True):
        p.grad = (total / samples).to(p.dtype)
    return loss_sum / samples


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    params = [p for p in ddp_model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    losses = []
    with ddp_model.no_sync():
        for x, y in micro_batches:
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            losses.append(loss.detach().double())
            for p, total in zip(params, sums, strict=True):
                total += p.grad
                p.grad = None
    count = len(micro_batches) * dist.get_world_size()
    loss_sum = torch.stack(losses).sum()
    works = [dist.all_reduce(t, async_op=True) for t in [*reversed(sums), loss_sum]]
    for work in works:
        work.wait()
    for p, total in zip(params, sums, strict=True):
        p.grad = (total / count).to(p.dtype)
    return (loss_sum / count).item()
