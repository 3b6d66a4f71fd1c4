"""g all-reduces backward, too, as a collective does that is its own conjugate.

loses: btp_g
class: example
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
        return CopyIn.backward(ctx, gradient)


def copy_in(x):
    return CopyIn.apply(x)


def sum_out(x):
    return SumOut.apply(x)
