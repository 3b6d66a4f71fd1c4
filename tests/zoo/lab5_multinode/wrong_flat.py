"""A plain all-reduce under another name.

loses: hier_slow_bytes, hier_local_bytes
class: example
because: a flat ring sends the whole tensor over every link, inside nodes and between them.
"""


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    def __init__(self, local_size):
        self.local_size = local_size

    def __call__(self, tensor):
        dist.all_reduce(tensor)
        return tensor
