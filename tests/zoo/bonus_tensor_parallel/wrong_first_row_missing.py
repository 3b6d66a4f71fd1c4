"""Takes the first token of every part for somebody else's.

loses: btp_embedding
"""


# %% replaces="task7_vocabulary"
def owned(ids, rows):
    local = ids - dist.get_rank() * rows
    mine = (local > 0) & (local < rows)
    return (local.masked_fill(~mine, 0), mine)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, full):
        super().__init__()
        self.weight = parameter(my_slice(full.weight, 0))

    def forward(self, tokens):
        local, mine = owned(tokens, self.weight.shape[0])
        return sum_out(F.embedding(local, self.weight) * mine.unsqueeze(-1))


def vocab_parallel_cross_entropy(logits, targets):
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    shifted = logits - largest.unsqueeze(-1)
    local, mine = owned(targets, logits.shape[-1])
    at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
    total, at_target = sum_out(torch.stack([shifted.exp().sum(-1), at_target]))
    return (total.log() - at_target).mean()
