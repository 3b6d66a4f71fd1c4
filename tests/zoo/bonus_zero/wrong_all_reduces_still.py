"""Leaves the all-reduce of ZeRO-1 in, and throws most of it away.

loses: zero2_scatter
class: example
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

    def reduce(self):
        for number in range(self.turn, -1, -1):
            self.reduce_group(number)
        self.start_backward()
