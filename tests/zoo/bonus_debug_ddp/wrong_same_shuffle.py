"""Gives all loaders one seed, so that all ranks see the same samples at the same time.

loses: debug_train_shares, debug_train_epochs
because: no sampler deals samples out, so shares overlap and there is no epoch to set
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=order)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for _ in range(num_epochs):
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(ddp_model.module.state_dict(), path)
