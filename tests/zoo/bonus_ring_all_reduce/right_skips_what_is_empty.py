"""Neither sends nor receives a tensor without numbers.

loses: nothing
"""


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    size = dist.get_world_size()
    if size == 1:
        incoming[:] = outgoing
        return
    works = []
    if outgoing.numel():
        works.append(dist.isend(outgoing, (dist.get_rank() + 1) % size))
    if incoming.numel():
        works.append(dist.irecv(incoming, (dist.get_rank() - 1) % size))
    for work in reversed(works):
        work.wait()
