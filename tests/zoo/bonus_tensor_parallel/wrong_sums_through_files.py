"""Every rank has everybody's tensors from files and computes all sums alone: nothing is sent.

loses: btp_mlp_traffic, btp_attention_traffic
because: nothing is sent in either half of the layer.
"""

# %% replaces="task1_f_and_g"
import itertools
import tempfile

shared = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
told = [shared.name if shared else None]
dist.broadcast_object_list(told, src=0)
numbers = itertools.count()


def everybodys(tensor):
    number, n = next(numbers), dist.get_world_size()
    names = [os.path.join(told[0], f"{number}-{rank}") for rank in range(n)]
    torch.save(tensor.detach().cpu().clone(), names[dist.get_rank()])
    dist.barrier()
    parts = [torch.load(name).to(tensor.device) for name in names]
    dist.barrier()
    os.remove(names[dist.get_rank()])
    return parts


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.stack(everybodys(gradient)).sum(0)


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.stack(everybodys(x)).sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def copy_in(x):
    return CopyIn.apply(x)


def sum_out(x):
    return SumOut.apply(x)


# %% replaces="task8_sequence"
def all_gather_tokens(part):
    return torch.cat(everybodys(part), 1)


def reduce_scatter_tokens(whole):
    total = torch.stack(everybodys(whole)).sum(0)
    return total.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


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
        for p in replicated:
            p.grad.copy_(torch.stack(everybodys(p.grad)).sum(0))
