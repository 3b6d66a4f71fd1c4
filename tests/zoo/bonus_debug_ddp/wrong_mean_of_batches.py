"""No sample comes twice, but a small batch counts as much as a full one.

loses: debug_evaluate_batches
says: debug_evaluate_batches Every sample has the same weight
"""


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE))
            totals[1] += 1
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()
