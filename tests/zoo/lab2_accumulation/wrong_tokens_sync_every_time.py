"""Every micro-batch of tokens is all-reduced; the result is right, and the network busy.

loses: accum_token_traffic
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    device = micro_batches[0][0].device
    num_tokens = torch.tensor(float(sum(counts)), dtype=torch.float64, device=device)
    dist.all_reduce(num_tokens)
    scale = dist.get_world_size() / num_tokens.item()
    loss_sum = torch.zeros((), device=device)
    for (tokens, targets), count in zip(micro_batches, counts, strict=True):
        share = loss_fn(ddp_model(tokens), targets) * (count * scale)
        share.backward()
        loss_sum += share.detach()
    dist.all_reduce(loss_sum)
    return (loss_sum / dist.get_world_size()).item()
