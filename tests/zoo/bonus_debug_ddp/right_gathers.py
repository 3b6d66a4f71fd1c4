"""Gathers instead of reducing, in every case that can be done so.

loses: nothing
class: example
"""


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    for p in model.parameters():
        parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad)
        p.grad = torch.stack(parts).mean(dim=0)
    optimizer.step()


# %% replaces="mend_4"
def accumulate(ddp_model, micro_batches, loss_fn):
    losses = []
    with ddp_model.no_sync():
        for x, y in micro_batches:
            losses.append(loss_fn(ddp_model(x), y))
            losses[-1].backward()
    count = len(losses) * dist.get_world_size()
    for p in ddp_model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= count
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sum(loss.item() for loss in losses))
    return sum(everyone) / count


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    begin, end = (len(dataset) * r // world_size for r in (rank, rank + 1))
    losses = []
    with torch.no_grad():
        for x, y in DataLoader(torch.utils.data.Subset(dataset, range(begin, end))):
            losses.append(loss_fn(model(x.to(DEVICE)), y.to(DEVICE)).item())  # one by one
    everyone = [None] * world_size
    dist.all_gather_object(everyone, losses)
    return sum(map(sum, everyone)) / len(dataset)


# %% replaces="mend_10"
def reduce_metrics(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    collected = {}
    for other in everyone:
        for name, value in other.items():
            collected.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in collected.items()}
