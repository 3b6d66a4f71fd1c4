"""The gradient is right; the loss that is returned is the mean of the micro-batches' means.

loses: accum_token_loss
says: accum_token_loss That is the mean of the micro-batches' means
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(ddp_model, micro_batches, loss_fn):
    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    number = torch.tensor(float(sum(counts)))
    dist.all_reduce(number)
    scale = dist.get_world_size() / number.item()
    last = len(micro_batches) - 1
    total = torch.zeros(())
    for i, (tokens, targets) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < last else contextlib.nullcontext():
            loss = loss_fn(ddp_model(tokens), targets)
            (loss * (counts[i] * scale)).backward()
        total += loss.detach() / len(micro_batches)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
