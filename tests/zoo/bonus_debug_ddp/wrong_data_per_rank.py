"""The other bugs of the script are mended, but each rank draws a dataset of its own.

loses: debug_train_data
class: example
says: debug_train_data Rank 0's are: a generator seeded with `seed`
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed + rank)))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(ddp_model.module.state_dict(), path)
