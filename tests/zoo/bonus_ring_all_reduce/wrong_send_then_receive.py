"""Sends first and receives then: everybody waits for the right neighbour.

loses: ring_exchange
status: ring_exchange TIMEOUT
class: example
"""


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        incoming.copy_(outgoing)
        return
    dist.send(outgoing, (rank + 1) % n)
    dist.recv(incoming, (rank - 1) % n)
