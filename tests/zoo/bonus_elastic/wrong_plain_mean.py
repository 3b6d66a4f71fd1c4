"""The mean over ranks, as DDP takes it.

loses: elastic_gradient
class: example
"""


# %% replaces="task1_combine"
def combine(parameters: Iterable, loss: float, num_own: int, num_all: int) -> float:
    """Gradients and loss of the global batch, from each rank's means over its own samples."""
    parameters = list(parameters)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(grad.flatten() for grad in grads), grads[0].new_tensor([loss])])
    flat *= 1 / dist.get_world_size()
    dist.all_reduce(flat)
    *pieces, mean = flat.split([*(p.numel() for p in parameters), 1])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.view_as(p).clone()
    return mean.item()
