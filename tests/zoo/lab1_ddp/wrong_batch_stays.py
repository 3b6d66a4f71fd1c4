"""Never moves the targets to the device.

loses: train_steps
"""


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for x, y in loader:
            x = x.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * len(x)
            totals[1] += len(x)
        dist.all_reduce(totals)
        losses.append((totals[0] / totals[1]).item())
    return losses
