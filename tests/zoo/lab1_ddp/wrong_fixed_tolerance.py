"""Compares with 1e-6, whatever tolerance it was given.

loses: gradients_in_sync
"""


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    device = next(model.parameters()).device
    ok = torch.ones((), dtype=torch.int32, device=device)
    for p in model.parameters():
        has = torch.tensor([0.0 if p.grad is None else 1.0], device=device)
        grad = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        flags = [torch.empty_like(has) for _ in parts]
        dist.all_gather(flags, has)
        stack = torch.stack(parts)
        if torch.cat(flags).unique().numel() != 1 or bool(
            ((stack.amax(0) - stack.amin(0)) > 1e-6).any()
        ):
            ok.zero_()
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    return bool(ok)
