"""Divides by the number of tokens of all ranks, and forgets that DDP divides by the ranks as well.

loses: accum_token_gradients
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    counts = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches])
    everywhere = counts.sum()
    dist.all_reduce(everywhere)
    k, total = len(micro_batches), 0.0
    for i, (tokens, targets) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(tokens), targets) * counts[i] / everywhere
            loss.backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return total.item()
