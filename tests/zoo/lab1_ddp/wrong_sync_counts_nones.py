"""Compares how many gradients are None, not which.

loses: gradients_in_sync
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    grads = [p.grad for p in model.parameters()]
    has = torch.tensor(float(sum(g is None for g in grads)))
    most, least = has.clone(), has.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if not torch.equal(most, least):
        return False
    same = True
    for grad, p in zip(grads, model.parameters(), strict=True):
        if most < len(grads):
            grad = torch.zeros_like(p) if grad is None else grad
            high, low = grad.clone(), grad.clone()
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            same = same and bool((high - low).max() <= tol)
    return same
