"""Never tells the sampler the epoch: every epoch has the same order.

loses: train_epochs
class: example
"""


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    losses = []
    for _ in range(num_epochs):
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            totals += torch.tensor([loss.item() * len(x), len(x)], device=device)
        dist.all_reduce(totals)
        losses.append((totals[0] / totals[1]).item())
    return losses
