"""Takes all nodes to be as large as the first.

loses: node_places
"""


# %% replaces="task1_places"
def locate(rank, local_sizes):
    return rank // local_sizes[0], rank % local_sizes[0]


def global_rank(node_rank, local_rank, local_sizes):
    return node_rank * local_sizes[0] + local_rank
