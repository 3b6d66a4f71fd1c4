"""Each rank takes the mean of its share; then the mean of these, with equal weights.

loses: debug_evaluate_tail
"""


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE)) * len(x)
            totals[1] += len(x)
    mean = totals[0] / max(1, totals[1])
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
