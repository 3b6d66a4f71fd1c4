"""Leaves the old gradients in.

loses: debug_train_zero_grad
says: debug_train_zero_grad Each step still holds the gradients of the steps before it
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(ddp_model.module.state_dict(), path)
