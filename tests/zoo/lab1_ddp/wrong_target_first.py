"""Calls loss_fn(target, prediction): the same for the squared error, and for no other loss.

loses: train_steps
"""


# %% replaces="task4_train"
def train(
    ddp_model: nn.Module,
    dataset: Dataset,
    sampler: ShardSampler,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_epochs: int,
    batch_size: int,
    lr: float,
    device: torch.device,
) -> list[float]:
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        loss_sum, count = 0.0, 0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(y, ddp_model(x))
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(x)
            count += len(x)
        totals = torch.tensor([loss_sum, count], dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        losses.append((totals[0] / totals[1]).item())
    return losses
