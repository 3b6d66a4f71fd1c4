"""Sends the whole tensor round the ring, N - 1 times: to the right neighbours, but too much.

loses: ring_bytes, ring_messages, ring_time
class: example
because: N times as much in each message is N times the bytes and N times the seconds
says: ring_bytes times the whole tensors
says: ring_time steps of one chunk
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    moving, flat = tensor.reshape(-1).clone(), tensor.view(-1)
    for _ in range(dist.get_world_size() - 1):
        arrived = torch.empty_like(moving)
        exchange(moving, arrived)
        if op == "max":
            flat.copy_(torch.maximum(flat, arrived))
        else:
            flat += arrived
        moving = arrived
    if op == "mean":
        flat /= dist.get_world_size()
    return tensor
