"""Divides by the number of tokens of the rank itself: right on one rank, a mean of means over many.

loses: accum_token_gradients
says: accum_token_gradients divide by the tokens of all ranks
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    counts = [(targets != IGNORED).sum().item() for _, targets in micro_batches]
    k, total = len(micro_batches), 0.0
    for i, (tokens, targets) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(tokens), targets) * counts[i] / sum(counts)
            loss.backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
