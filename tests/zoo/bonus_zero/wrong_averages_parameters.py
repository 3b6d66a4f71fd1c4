"""Averages parameters after each rank's own step. With SGD that is the same.

loses: zero1_reduce, zero1_adamw, zero1_options, zero1_gather, zero1_memory
misses: sharding
because: what it averages is not a gradient, so AdamW, its options, traffic and memory all differ.
says: zero1_reduce some are on several ranks
says: zero1_adamw AdamW needs the mean of the gradients
says: zero1_gather was in a reduction over all
says: zero1_memory out of memory (in step: self.inner.step())
"""


# %% replaces="task4_zero1"
class ZeRO1:
    def __init__(self, params, optimizer_class, **options):
        self.n = dist.get_world_size()
        self.inner = optimizer_class(trainable_groups(params), **options)
        self.param_groups = self.inner.param_groups
        self.weights = [p for group in self.param_groups for p in group["params"]]
        self.sums = [None] * len(self.weights)

    def reduce(self):
        for i, p in enumerate(self.weights):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
            self.sums[i] = grad if self.sums[i] is None else self.sums[i] + grad

    def gradients(self):
        return [g for g in self.sums if g is not None]

    def clip_grad_norm(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.weights, max_norm).item()

    def step(self):
        for p, g in zip(self.weights, self.sums):
            p.grad = g
        self.inner.step()
        for p in self.weights:
            dist.all_reduce(p.data)
            p.data /= self.n

    def zero_grad(self):
        self.sums = [None] * len(self.weights)
        for p in self.weights:
            p.grad = None


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
