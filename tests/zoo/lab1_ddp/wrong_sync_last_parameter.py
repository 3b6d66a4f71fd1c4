"""Keeps the answer of the last parameter only.

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
            high, low = grad.clone(), grad.clone()
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            same = bool((high - low).max() <= tol)
    return same
