"""Never wraps the model: each rank trains for itself.

loses: debug_train_zero_grad
says: debug_train_zero_grad This rank's own gradient alone was stepped with
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.state_dict(), path)
