"""Gradients travel in a float32 vector: those of a float64 model are rounded.

loses: elastic_gradient
says: elastic_gradient rounded to float32 on its way
"""


# %% replaces="task1_combine"
def combine(parameters: Iterable, loss: float, num_own: int, num_all: int) -> float:
    parameters = list(parameters)
    device = parameters[0].device
    flat = torch.zeros(sum(p.numel() for p in parameters) + 1, device=device)
    at = 0
    for p in parameters:
        if p.grad is not None:
            flat[at : at + p.numel()].copy_(p.grad.flatten())
        at += p.numel()
    flat[-1] = loss
    flat *= num_own / num_all
    dist.all_reduce(flat)
    at = 0
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
    return flat[-1].item()
