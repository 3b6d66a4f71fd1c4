"""A gradient of its own that forgets the one that came in.

loses: btp_loss_gradient
says: btp_loss_gradient multiply by the gradient that came in
"""


# %% replaces="task7_vocabulary"
def owned(ids, rows):
    local = ids - dist.get_rank() * rows
    mine = (local >= 0) & (local < rows)
    return (local.masked_fill(~mine, 0), mine)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, full):
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 0))

    def forward(self, tokens):
        local, mine = owned(tokens, self.weight.shape[0])
        return sum_out(F.embedding(local, self.weight) * mine.unsqueeze(-1))


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        local, mine = owned(targets, logits.shape[-1])
        one_hot = F.one_hot(local, logits.shape[-1]) * mine.unsqueeze(-1)
        sums = torch.stack([shifted.exp().sum(-1), (shifted * one_hot).sum(-1)])
        dist.all_reduce(sums)
        ctx.save_for_backward(shifted.exp() / sums[0].unsqueeze(-1) - one_hot)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        return difference / difference[..., 0].numel(), None


def vocab_parallel_cross_entropy(logits, targets):
    return CrossEntropy.apply(logits, targets)
