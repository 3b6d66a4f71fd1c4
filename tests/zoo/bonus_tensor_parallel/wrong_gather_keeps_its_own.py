"""Backward, gather_in keeps its own tokens of its own gradient.

loses: btp_sequence_operators
"""


# %% replaces="task8_sequence"
def all_gather_tokens(part):
    front = part.movedim(1, 0).contiguous()
    whole = front.new_empty(front.shape[0] * dist.get_world_size(), *front.shape[1:])
    all_gather_single(whole, front)
    return whole.movedim(0, 1).contiguous()


def reduce_scatter_tokens(whole):
    front = whole.movedim(1, 0).contiguous()
    part = front.new_empty(front.shape[0] // dist.get_world_size(), *front.shape[1:])
    reduce_scatter_single(part, front)
    return part.movedim(0, 1).contiguous()


class GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather_tokens(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


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
