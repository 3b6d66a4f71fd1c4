"""f does nothing backward either: outputs right, gradients below it shares.

loses: btp_f
class: example
"""


# %% replaces="task1_f_and_g"
class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


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
    return CopyIn.apply(x)


def sum_out(x):
    return SumOut.apply(x)
