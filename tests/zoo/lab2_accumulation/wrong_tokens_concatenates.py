"""Puts all micro-batches of tokens, padded to one length, into one large batch.

loses: accum_token_gradients
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    longest = max(targets.shape[1] for _, targets in micro_batches)

    def together(parts, value):
        pad = nn.functional.pad
        return torch.cat([pad(x, (0, longest - x.shape[1]), value=value) for x in parts])

    tokens = together([tokens for tokens, _ in micro_batches], 0)
    targets = together([targets for _, targets in micro_batches], IGNORED)
    count = (targets != IGNORED).sum()
    total = count.clone()
    dist.all_reduce(total)
    loss = loss_fn(ddp_model(tokens), targets) * (count * dist.get_world_size() / total)
    loss.backward()
    mean = loss.detach()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()
