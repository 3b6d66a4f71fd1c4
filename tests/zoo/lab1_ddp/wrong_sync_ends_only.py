"""Compares the first and the last rank only.

loses: gradients_in_sync
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    grads = [p.grad for p in model.parameters()]
    has = torch.tensor([float(g is not None) for g in grads])
    most, least = has.clone(), has.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if not torch.equal(most, least):
        return False
    same = True
    for grad in grads:
        if grad is not None:
            ends = dist.get_rank() in (0, dist.get_world_size() - 1)
            high = grad.clone() if ends else torch.full_like(grad, -math.inf)
            low = grad.clone() if ends else torch.full_like(grad, math.inf)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            same = same and bool((high - low).max() <= tol)
    return same
