"""Conjugates of its own for gathering and splitting; all-to-all for reduce-scatter.

loses: nothing
"""


# %% replaces="task2_linear"
def my_slice(tensor, dim):
    n = dist.get_world_size()
    if tensor.shape[dim] % n:
        raise ValueError(f"{tensor.shape[dim]} features cannot be split over {n} ranks")
    return tensor.chunk(n, dim)[dist.get_rank()]


def parameter(tensor):
    return nn.Parameter(tensor.detach().clone())


def joined(x, dim):
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return joined(x, -1)

    @staticmethod
    def backward(ctx, gradient):
        return my_slice(gradient, -1)


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return my_slice(x, -1).clone()

    @staticmethod
    def backward(ctx, gradient):
        return joined(gradient, -1)


class ColumnParallelLinear(nn.Module):
    def __init__(self, full, gather_output=False, enter=copy_in):
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 0))
        self.bias = None if full.bias is None else parameter(my_slice(full.bias, 0))
        self.gather_output, self.enter = (gather_output, enter)

    def forward(self, x):
        y = F.linear(self.enter(x), self.weight, self.bias)
        return Join.apply(y) if self.gather_output else y


class RowParallelLinear(nn.Module):
    def __init__(self, full, input_is_parallel=True, leave=sum_out):
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 1))
        self.bias = None if full.bias is None else parameter(full.bias)
        self.input_is_parallel, self.leave = (input_is_parallel, leave)

    def forward(self, x):
        if not self.input_is_parallel:
            x = Split.apply(x)
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


# %% replaces="task8_sequence"
def all_gather_tokens(part):
    return joined(part, 1)


def reduce_scatter_tokens(whole):
    n = dist.get_world_size()
    sending = torch.stack(whole.chunk(n, 1)).contiguous()
    coming = torch.empty_like(sending)
    dist.all_to_all_single(coming, sending)
    return coming.sum(0)


class GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather_tokens(x)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter_tokens(gradient)


class ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter_tokens(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather_tokens(gradient)


def gather_in(x):
    return GatherIn.apply(x)


def scatter_out(x):
    return ScatterOut.apply(x)


class SequenceParallelBlock(ParallelBlock):
    def __init__(self, full):
        super().__init__(full, enter=gather_in, leave=scatter_out)

    def finish_gradients(self):
        replicated = [*self.norm1.parameters(), *self.norm2.parameters()]
        replicated += [self.attention.out.bias, self.mlp.down.bias]
        flat = torch.cat([p.grad for p in replicated])
        dist.all_reduce(flat)
        for p, total in zip(replicated, flat.split([p.numel() for p in replicated]), strict=True):
            p.grad.copy_(total)
