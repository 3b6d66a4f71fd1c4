"""Wants differences below tol, so that with tol=0 nothing is equal.

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
        high, low = p.grad.detach().clone(), p.grad.detach().clone()
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        if not bool((high - low < tol).all()):
            same = False
    return same
