"""Rank 1 skips the all-reduce of the losses, for which the other ranks then wait: a deadlock.

loses: train_steps, train_epochs, train_loss
because: the function never returns
status: train_steps TIMEOUT
status: train_epochs TIMEOUT
status: train_loss TIMEOUT
class: example
says: train_steps rank 1: finished the cell after
says: train_epochs rank 1: finished the cell after
"""


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    totals = torch.zeros(num_epochs, 2, dtype=torch.float64, device=device)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            totals[epoch] += torch.tensor([loss.item() * len(x), len(x)], device=device)
    if dist.get_rank() != 1:
        dist.all_reduce(totals)
    return (totals[:, 0] / totals[:, 1]).tolist()
