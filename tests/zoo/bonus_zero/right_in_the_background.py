"""Reduces one group in the background while backward fills the next.

loses: nothing
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

    waiting = None

    def finish(self):
        if self.waiting is not None:
            work, part, _, shard = self.waiting
            self.waiting = None
            work.wait()
            part /= self.num_ranks
            shard.grad = part if shard.grad is None else shard.grad.add_(part)

    def reduce_group(self, number):
        self.finish()
        parameters, shard = self.parameters[number], self.shards[number]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = flatten(grads, self.num_ranks)
        for p in parameters:
            p.grad = None
        part = torch.empty_like(shard.data)
        work = reduce_scatter_single(part, flat, async_op=True)
        self.waiting = work, part, flat, shard  # flat has to live until then

    def reduce(self):
        for number in range(self.turn, -1, -1):
            self.reduce_group(number)
        self.finish()
        self.start_backward()
