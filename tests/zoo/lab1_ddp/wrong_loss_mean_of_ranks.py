"""The mean over ranks of each rank's mean: wrong where one rank has more samples than another.

loses: train_loss
"""


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        loss_sum, count = 0.0, 0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(x)
            count += len(x)
        mean = torch.tensor(loss_sum / count, device=device)
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses
