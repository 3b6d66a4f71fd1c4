"""Three bugs mended, no sampler: every rank goes through a shuffled copy of everything.

loses: debug_train_shares, debug_train_epochs
class: example
because: no sampler deals samples out, so shares overlap and there is no epoch to set
says: debug_train_shares A DistributedSampler gives each rank its share
"""


# %% replaces="mend_1"
def train(model, make_data, *, seed, num_epochs, batch_size, lr, path):
    rank = dist.get_rank()
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
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
