"""The loss from the log-sum-exps of the ranks; the stream with fork_rng.

loses: nothing
"""


# %% replaces="task5_stream"
class RankStream:
    def __init__(self, seed):
        self.random = torch.cuda if DEVICE.type == "cuda" else torch.random
        devices = [DEVICE] if DEVICE.type == "cuda" else []
        self.guard = lambda: torch.random.fork_rng(devices=devices)
        with self.guard():
            torch.manual_seed(seed ^ (0x9E3779B9 * (dist.get_rank() + 1)))
            self.state = self.random.get_rng_state()

    def fork(self):
        return self

    def __enter__(self):
        self.outer = self.guard()
        self.outer.__enter__()
        self.random.set_rng_state(self.state)

    def __exit__(self, *error):
        self.state = self.random.get_rng_state()
        self.outer.__exit__(*error)


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
    own = logits.logsumexp(-1)
    n, rank = dist.get_world_size(), dist.get_rank()
    spots = F.one_hot(torch.tensor(rank, device=own.device), n).to(own)
    every = sum_out(own.unsqueeze(-1) * spots)  # the log-sum-exp of each rank
    local, mine = owned(targets, logits.shape[-1])
    target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(mine, 0.0)
    return (every.logsumexp(-1) - sum_out(target)).mean()
