"""Pads to equal chunks in a copy, and writes the result back: a second tensor.

loses: ring_messages
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    each = -(-tensor.numel() // n)
    padded = tensor.new_zeros(n, each)
    padded.view(-1)[: tensor.numel()] = tensor.reshape(-1)
    for step, (sent, received) in enumerate(ring_steps(rank, n)):
        arrived = torch.empty_like(padded[received])
        exchange(padded[sent].clone(), arrived)
        if step < n - 1:
            own = padded[received]
            arrived = torch.maximum(own, arrived) if op == "max" else own + arrived
        padded[received] = arrived
    if op == "mean":
        padded = padded / n
    tensor.copy_(padded.view(-1)[: tensor.numel()].view(tensor.shape))
    return tensor
