"""Compares gradients by reducing them in place, so that afterwards they are other ones.

loses: gradients_in_sync
says: gradients_in_sync a gradient was changed: work on a copy of it
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    params = list(model.parameters())
    has = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(has)
    if not all(h in (0, dist.get_world_size()) for h in has.tolist()):
        return False
    ok = True
    for p in params:
        if p.grad is not None:
            low = p.grad.clone()
            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            ok = ok and (p.grad - low).max().item() <= tol
    return ok
