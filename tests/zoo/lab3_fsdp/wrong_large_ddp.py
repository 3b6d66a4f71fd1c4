"""Trains the large model with plain DDP.

loses: fsdp_budget
class: example
"""


# %% replaces="task5_large"
def train_large(
    make_model: Callable[[], nn.Sequential],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    lr: float,
) -> list[float]:
    """Trains sharded; per step the loss's mean over ranks."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
