"""Counters are never set back: the second backward is reduced by nobody.

loses: zero2_accumulate, zero2_order, zero2_scatter, zero2_memory, zero_resume, zero_reshard
because: after the first backward nothing of ZeRO-2 works any more.
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
        while self.turn >= 0 and self.missing[self.turn] == 0:
            self.reduce_group(self.turn)
            self.turn -= 1

    def mean_part(self, flat):
        part = flat.new_empty(flat.numel() // self.num_ranks)
        reduce_scatter_single(part, flat)
        return part / self.num_ranks

    def reduce(self):
        for number in range(self.turn, -1, -1):
            self.reduce_group(number)
