"""The loss as an autograd function; an embedding that selects its tokens.

loses: nothing
class: example
"""


# %% replaces="task7_vocabulary"
class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        largest = logits.max(-1, keepdim=True).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        softmax = (logits - largest).exp_()
        first = dist.get_rank() * logits.shape[-1]
        columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
        one_hot = columns == targets.unsqueeze(-1)
        sums = torch.stack([softmax.sum(-1), logits.masked_fill(~one_hot, 0).sum(-1)])
        dist.all_reduce(sums)
        ctx.save_for_backward(softmax.div_(sums[0].unsqueeze(-1)) - one_hot.to(softmax))
        return (sums[0].log() + largest.squeeze(-1) - sums[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        return gradient * difference / difference[..., 0].numel(), None


def vocab_parallel_cross_entropy(logits, targets):
    return CrossEntropy.apply(logits, targets)


class VocabParallelEmbedding(nn.Embedding):
    def __init__(self, full):
        part = my_slice(full.weight, 0)
        super().__init__(*part.shape)
        self.weight = parameter(part)

    def forward(self, tokens):
        rows = self.weight.shape[0]
        mine = tokens // rows == dist.get_rank()
        out = self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        out[mine] = super().forward(tokens[mine] % rows)
        return sum_out(out)
