"""Goes through the iterator of parameters twice.

loses: elastic_gradient
"""


# %% replaces="task1_combine"
def combine(parameters: Iterable, loss: float, num_own: int, num_all: int) -> float:
    """Gradients and loss of the global batch, from each rank's means over its own samples."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    shapes = [grad.numel() for grad in grads]
    flat = torch.cat([*(grad.flatten() for grad in grads), grads[0].new_tensor([loss])])
    flat *= num_own / num_all
    dist.all_reduce(flat)
    *pieces, mean = flat.split([*shapes, 1])
    for p, piece in zip(parameters, pieces, strict=False):
        p.grad = piece.view_as(p).clone()
    return mean.item()
