"""locate takes the nodes' sizes out of the list that it was given.

loses: node_places
"""


# %% replaces="task1_places"
def locate(rank: int, local_sizes: list[int]) -> tuple[int, int]:
    node = 0
    while rank >= local_sizes[0]:
        rank -= local_sizes.pop(0)
        node += 1
    return node, rank


def global_rank(node_rank: int, local_rank: int, local_sizes: list[int]) -> int:
    return sum(local_sizes[:node_rank]) + local_rank
