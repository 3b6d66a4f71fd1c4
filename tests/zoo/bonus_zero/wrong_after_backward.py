"""Reduces everything when backward is over.

loses: zero2_memory
class: example
"""


# %% replaces="task5_zero2"
class ZeRO2(ZeRO1):
    def mean_part(self, flat):
        part = flat.new_empty(flat.numel() // self.num_ranks)
        reduce_scatter_single(part, flat)
        return part / self.num_ranks

    def reduce(self):
        for number in range(len(self.shards) - 1, -1, -1):
            self.reduce_group(number)
