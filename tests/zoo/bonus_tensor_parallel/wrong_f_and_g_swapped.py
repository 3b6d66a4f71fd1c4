"""f where g belongs, and g where f belongs.

loses: btp_f, btp_g
class: example
because: two operators, and both are wrong.
"""


# %% replaces="task1_f_and_g"
class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def copy_in(x):
    return SumOut.apply(x)


def sum_out(x):
    return CopyIn.apply(x)
