"""Other words for the same: hstack and pad, a norm in float64, formulas as tables.

A training step returns its norm as a vector of one number.

loses: nothing
"""


# %% replaces="task1_flat"
def flatten(tensors, num_parts):
    vector = torch.hstack([t.detach().flatten() for t in tensors])
    return nn.functional.pad(vector, (0, -len(vector) % num_parts))


@torch.no_grad()
def unflatten(flat, tensors):
    at = 0
    for tensor in tensors:
        tensor.data[...] = flat[at : at + tensor.numel()].reshape(tensor.shape)
        at += tensor.numel()


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    own = torch.cat([torch.zeros(1, device=DEVICE), *gradients])
    square = own.double().norm() ** 2
    dist.all_reduce(square, op=dist.ReduceOp.SUM)
    norm = float(square.sqrt())
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm).div_(norm)
    return norm


# %% replaces="task7_planning"
def share_of(sizes, num_ranks):
    return sum((size + num_ranks - 1) // num_ranks for size in sizes)


def memory_per_rank(sizes, num_ranks, stage):
    p, s = 4 * sum(sizes), 4 * share_of(sizes, num_ranks)
    return {0: (p, p, 2 * p), 1: (p, p, 3 * s), 2: (p, s, 3 * s), 3: (s, s, 2 * s)}[stage]


def bytes_sent(sizes, num_ranks, stage, micro_batches=1):
    ring = (num_ranks - 1) * share_of(sizes, num_ranks) * 4
    if stage == 3:
        return micro_batches * (ring + ring + ring)
    if stage == 2:
        return micro_batches * ring + ring
    return 2 * ring + (ring if stage else 0)


# %% replaces="task8_train"
def train_step(model, optimizer, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    losses = []
    for x, y in micro_batches:
        losses.append(loss_fn(model(x), y))
        (losses[-1] * (1 / len(micro_batches))).backward()
        optimizer.reduce()
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean().item(), torch.tensor([norm])
