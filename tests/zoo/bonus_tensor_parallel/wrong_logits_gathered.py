"""Gathers the logits, and uses torch's loss.

loses: btp_loss_traffic
class: example
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


def vocab_parallel_cross_entropy(logits, targets):
    rank, n, own = dist.get_rank(), dist.get_world_size(), logits.shape[-1]
    whole = sum_out(F.pad(logits, (rank * own, (n - 1 - rank) * own)))
    return F.cross_entropy(whole.flatten(0, -2), targets.flatten())
