"""Reduces in backward, and lets go of the gradients only at the end.

loses: zero2_memory
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

    def reduce_group(self, number):
        grads = [p.grad for p in self.parameters[number]]
        super().reduce_group(number)
        for p, grad in zip(self.parameters[number], grads):
            p.grad = grad

    def mean_part(self, flat):
        part = flat.new_empty(flat.numel() // self.num_ranks)
        reduce_scatter_single(part, flat)
        return part / self.num_ranks

    def reduce(self):
        for number in range(self.turn, -1, -1):
            self.reduce_group(number)
        for parameters in self.parameters:
            for p in parameters:
                p.grad = None
        self.start_backward()
