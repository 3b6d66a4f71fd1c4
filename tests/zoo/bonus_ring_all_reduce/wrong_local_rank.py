"""Takes its number on the node for its rank, and the node's ranks for all.

loses: ring_exchange
"""


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    rank, n = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if n == 1:
        incoming.copy_(outgoing)
        return
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
    ):
        work.wait()
