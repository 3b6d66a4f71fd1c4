"""Shards parameters and gradients, but AdamW works on whole copies of them on every rank.

loses: fsdp_budget
"""


# %% replaces="task5_large"
def train_large(
    make_model: Callable[[], nn.Sequential],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    lr: float,
) -> list[float]:
    """Trains sharded; per step the loss's mean over ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    whole = [p.full_tensor().detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(whole, lr=lr)
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for p, copy in zip(model.parameters(), whole, strict=True):
            copy.grad, p.grad = p.grad.full_tensor(), None
        optimizer.step()
        optimizer.zero_grad()
        for p, copy in zip(model.parameters(), whole, strict=True):
            own = torch.distributed.tensor.distribute_tensor(
                copy.detach(), p.device_mesh, p.placements
            )
            p.to_local().data.copy_(own.to_local())
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
