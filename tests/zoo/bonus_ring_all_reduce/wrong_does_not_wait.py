"""Never waits for what comes in.

loses: ring_exchange, ring_sum, ring_ops, ring_small, ring_bytes, ring_hook
"""

# ruff: noqa: F821


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        incoming.copy_(outgoing)
        return
    incoming.zero_()  # else it depends on chance what goes on: what a buffer held before
    kept.append(dist.irecv(incoming, (rank - 1) % n))
    dist.isend(outgoing, (rank + 1) % n).wait()


kept = []
