"""Never waits for what comes in.

loses: ring_exchange
"""


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        incoming.copy_(outgoing)
        return
    buffer = torch.zeros_like(incoming)
    kept.append((dist.irecv(buffer, (rank - 1) % n), buffer))
    incoming.copy_(buffer)  # what has come by now, however busy the machine is: nothing
    dist.isend(outgoing, (rank + 1) % n).wait()


kept = []
