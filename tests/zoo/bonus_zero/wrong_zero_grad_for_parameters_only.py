"""zero_grad() leaves the shards' gradients as they are.

loses: zero1_reduce, zero1_adamw, zero1_options, zero1_special, zero1_gather
because: from the second step on, every gradient of a shard is a sum.
"""


# %% replaces="task4_zero1"
class ZeRO1:
    def __init__(self, params, optimizer_class, **options):
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.parameters = []  # of each group
        self.shards = []
        sharded = []
        for group in trainable_groups(params):
            shard = nn.Parameter(self.part(flatten(group["params"], self.num_ranks)).clone())
            self.parameters.append(group["params"])
            self.shards.append(shard)
            sharded.append(group | {"params": [shard]})
        self.inner = optimizer_class(sharded, **options)

    def part(self, flat):
        return flat.chunk(self.num_ranks)[self.rank]

    def mean_part(self, flat):
        dist.all_reduce(flat)
        return self.part(flat).clone() / self.num_ranks

    def reduce_group(self, number):
        parameters, shard = self.parameters[number], self.shards[number]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = flatten(grads, self.num_ranks)
        for parameter in parameters:
            parameter.grad = None
        mean = self.mean_part(flat)
        shard.grad = mean if shard.grad is None else shard.grad + mean

    @property
    def param_groups(self):
        return self.inner.param_groups

    def reduce(self):
        for number in range(len(self.shards)):
            self.reduce_group(number)

    def gradients(self):
        return [shard.grad for shard in self.shards if shard.grad is not None]

    def clip_grad_norm(self, max_norm):
        return clip_by_global_norm(self.gradients(), max_norm)

    def step(self):
        self.inner.step()
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            flat = shard.data.new_empty(self.num_ranks * shard.numel())
            all_gather_single(flat, shard.data)
            unflatten(flat, parameters)

    def zero_grad(self):
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            for parameter in parameters:
                parameter.grad = None


# %% replaces="task5_zero2"
class Sharded:
    def __init__(self, params, optimizer_class, **options):
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.parameters = []  # of each group
        self.shards = []
        sharded = []
        for group in trainable_groups(params):
            shard = nn.Parameter(self.part(flatten(group["params"], self.num_ranks)).clone())
            self.parameters.append(group["params"])
            self.shards.append(shard)
            sharded.append(group | {"params": [shard]})
        self.inner = optimizer_class(sharded, **options)

    def part(self, flat):
        return flat.chunk(self.num_ranks)[self.rank]

    def mean_part(self, flat):
        dist.all_reduce(flat)
        return self.part(flat).clone() / self.num_ranks

    def reduce_group(self, number):
        parameters, shard = self.parameters[number], self.shards[number]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = flatten(grads, self.num_ranks)
        for parameter in parameters:
            parameter.grad = None
        mean = self.mean_part(flat)
        shard.grad = mean if shard.grad is None else shard.grad + mean

    @property
    def param_groups(self):
        return self.inner.param_groups

    def reduce(self):
        for number in range(len(self.shards)):
            self.reduce_group(number)

    def gradients(self):
        return [shard.grad for shard in self.shards if shard.grad is not None]

    def clip_grad_norm(self, max_norm):
        return clip_by_global_norm(self.gradients(), max_norm)

    def step(self):
        self.inner.step()
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            flat = shard.data.new_empty(self.num_ranks * shard.numel())
            all_gather_single(flat, shard.data)
            unflatten(flat, parameters)

    def zero_grad(self):
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            for parameter in [*parameters, shard]:
                parameter.grad = None


class ZeRO2(Sharded):
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
        self.start_backward()
