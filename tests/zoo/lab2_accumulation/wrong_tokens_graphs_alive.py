"""Adds up the losses of all micro-batches, and calls backward once.

loses: accum_token_gradients
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    number = torch.tensor(float(sum(counts)))
    dist.all_reduce(number)
    scale = dist.get_world_size() / number.item()
    last = len(micro_batches) - 1
    total = 0.0
    for i, (tokens, targets) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < last else contextlib.nullcontext():
            total = total + loss_fn(ddp_model(tokens), targets) * (counts[i] * scale)
    total.backward()
    mean = total.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
