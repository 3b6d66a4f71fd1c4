"""Compares each rank with the next one, so differences may add up from rank to rank.

loses: gradients_in_sync
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model: nn.Module, tol: float = 1e-6) -> bool:
    params = list(model.parameters())
    if not params:
        return True
    device = params[0].device
    have = torch.tensor([p.grad is not None for p in params], dtype=torch.int32, device=device)
    most, least = have.clone(), have.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if not torch.equal(most, least):
        return False
    same = True
    for p in params:
        if p.grad is None:
            continue
        parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad.detach().clone())
        for number in range(len(parts) - 1):
            if not bool(((parts[number] - parts[number + 1]).abs() <= tol).all()):
                same = False
    return same
