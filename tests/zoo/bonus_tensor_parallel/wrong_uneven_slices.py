"""Splits what does not divide, too.

loses: btp_slices
"""


# %% replaces="task2_linear"
def my_slice(tensor, dim):
    n = dist.get_world_size()
    if False:
        raise ValueError(f"{tensor.shape[dim]} features cannot be split over {n} ranks")
    return tensor.tensor_split(n, dim)[dist.get_rank()]


def parameter(tensor):
    return nn.Parameter(tensor.detach().clone())


class ColumnParallelLinear(nn.Module):
    def __init__(self, full, gather_output=False, enter=copy_in):
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 0))
        self.bias = None if full.bias is None else parameter(my_slice(full.bias, 0))
        self.gather_output, self.enter = (gather_output, enter)

    def forward(self, x):
        y = F.linear(self.enter(x), self.weight, self.bias)
        if not self.gather_output:
            return y
        whole = y.new_zeros(*y.shape[:-1], y.shape[-1] * dist.get_world_size())
        whole.narrow(-1, y.shape[-1] * dist.get_rank(), y.shape[-1]).copy_(y)
        return sum_out(whole)


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
