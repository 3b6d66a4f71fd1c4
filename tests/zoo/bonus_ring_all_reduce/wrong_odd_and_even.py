"""Even ranks send first, odd ones receive first: no deadlock, and half of the links stand still.

loses: ring_time
"""


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    rank, n = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        incoming.copy_(outgoing)
    elif rank % 2:
        dist.recv(incoming, before)
        dist.send(outgoing, after)
    else:
        dist.send(outgoing, after)
        dist.recv(incoming, before)
