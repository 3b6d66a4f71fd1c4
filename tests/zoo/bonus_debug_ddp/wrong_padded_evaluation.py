"""Weights batches by their samples, but the sampler pads: samples at the tail count twice.

loses: debug_evaluate_tail
class: example
says: debug_evaluate_tail Some samples count twice
"""


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    sampler = DistributedSampler(dataset, shuffle=False)
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE)) * len(x)
            totals[1] += len(x)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()
