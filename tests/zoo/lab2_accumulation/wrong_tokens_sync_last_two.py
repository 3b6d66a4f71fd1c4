"""Synchronises in the last two micro-batches of tokens.

loses: accum_token_traffic
"""


# %% replaces="task4_accumulate_tokens"
def accumulate_tokens(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    k = len(micro_batches)
    world_size = dist.get_world_size()
    counts = torch.stack([(y != IGNORED).sum() for _, y in micro_batches])
    total = counts.sum()
    dist.all_reduce(total)
    losses = []
    for i, (x, y) in enumerate(micro_batches):
        context = ddp_model.no_sync() if i < k - 2 else contextlib.nullcontext()
        with context:
            loss = loss_fn(ddp_model(x), y) * (counts[i] * world_size / total)
            loss.backward()
        losses.append(loss.detach())
    mean = torch.stack(losses).sum() / world_size
    dist.all_reduce(mean)
    return mean.item()
