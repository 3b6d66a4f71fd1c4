"""Rank 0 looks at all samples while the others wait.

loses: debug_evaluate_tail
"""


# %% replaces="mend_7"
def evaluate(model, dataset, loss_fn, batch_size):
    own = range(len(dataset)) if dist.get_rank() == 0 else range(0)
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=own):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE)) * len(x)
            totals[1] += len(x)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()
