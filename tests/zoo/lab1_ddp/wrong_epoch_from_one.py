"""Tells the sampler epochs 1, 2, 3 instead of 0, 1, 2.

loses: train_epochs
"""


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch + 1)
        total = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)], device=device)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    return losses
