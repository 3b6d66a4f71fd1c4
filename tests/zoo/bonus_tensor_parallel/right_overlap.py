"""Column-parallel in one function: the weight's gradient while the input's travels.

Rank and number of ranks are the notebook's RANK and WORLD_SIZE.

loses: nothing
class: example
"""


# %% replaces="task2_linear"
def my_slice(tensor, dim):
    n = WORLD_SIZE
    if tensor.shape[dim] % n:
        raise ValueError(f"{tensor.shape[dim]} features cannot be split over {n} ranks")
    return tensor.chunk(n, dim)[RANK]


def parameter(tensor):
    return nn.Parameter(tensor.detach().clone())


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.with_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_x = gradient @ weight
        under_way = dist.all_reduce(for_x, async_op=True)
        rows = gradient.flatten(0, -2)
        for_weight = rows.T @ x.flatten(0, -2)
        for_bias = rows.sum(0) if ctx.with_bias else None
        under_way.wait()
        return for_x, for_weight, for_bias


class ColumnParallelLinear(nn.Linear):
    def __init__(self, full, gather_output=False, enter=copy_in):
        weight = my_slice(full.weight, 0)
        super().__init__(weight.shape[1], weight.shape[0], bias=full.bias is not None)
        self.weight = parameter(weight)
        if full.bias is not None:
            self.bias = parameter(my_slice(full.bias, 0))
        self.gather_output, self.enter = gather_output, enter

    def forward(self, x):
        if self.enter is copy_in:
            y = Column.apply(x, self.weight, self.bias)
        else:
            y = F.linear(self.enter(x), self.weight, self.bias)
        if not self.gather_output:
            return y
        own = y.shape[-1]
        return sum_out(F.pad(y, (RANK * own, (WORLD_SIZE - 1 - RANK) * own)))


class RowParallelLinear(nn.Module):
    def __init__(self, full, input_is_parallel=True, leave=sum_out):
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 1))
        self.bias = None if full.bias is None else parameter(full.bias)
        self.input_is_parallel, self.leave = (input_is_parallel, leave)

    def forward(self, x):
        if not self.input_is_parallel:
            x = my_slice(copy_in(x), -1)
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias
