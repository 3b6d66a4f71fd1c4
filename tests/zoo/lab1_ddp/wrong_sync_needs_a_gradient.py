"""Fails where no parameter has a gradient on any rank.

loses: gradients_in_sync
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model: nn.Module, tol: float = 1e-6) -> bool:
    """Whether every parameter's gradient is the same, within `tol`, on all ranks.

    Every rank has to call it, and every rank gets the same answer. None is the same as None only.
    """
    ### BEGIN SOLUTION
    params = list(model.parameters())
    if not params:
        return True

    # 1. Which gradients are there? The same ones on every rank, or we must not compare values.
    counts = torch.tensor([float(p.grad is not None) for p in params], device=params[0].device)
    dist.all_reduce(counts)
    if not ((counts == 0) | (counts == dist.get_world_size())).all():
        return False

    # 2. The largest value and the negated smallest one of each entry, in one all-reduce.
    grads = [p.grad.detach().double().flatten() for p in params if p.grad is not None]
    flat = torch.cat(grads)
    extremes = torch.stack([flat, -flat])
    extremes.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # NaN is never in sync
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return bool((extremes.sum(dim=0) <= tol).all())
    ### END SOLUTION
