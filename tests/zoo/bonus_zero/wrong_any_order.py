"""Reduces every group as soon as it is complete, in whatever order that is.

loses: zero2_order
"""


# %% replaces="task5_zero2"
class ZeRO2(ZeRO1):
    def __init__(self, params, optimizer_class, **options):
        super().__init__(params, optimizer_class, **options)
        self.start_backward()
        for number, parameters in enumerate(self.parameters):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.gradient_came(number)
                )

    def start_backward(self):
        self.missing = [len(parameters) for parameters in self.parameters]
        self.turn = len(self.parameters) - 1

    def gradient_came(self, number):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.reduce_group(number)

    def mean_part(self, flat):
        part = flat.new_empty(flat.numel() // self.num_ranks)
        reduce_scatter_single(part, flat)
        return part / self.num_ranks

    def reduce(self):
        for number in range(len(self.shards) - 1, -1, -1):
            if self.missing[number] > 0:
                self.reduce_group(number)
        self.start_backward()
