"""Synchronises in the last two micro-batches.

loses: accum_ddp_collectives, accum_ddp_backward, accum_ddp_time
because: what has travelled before is in what travels at the end, so nobody can find the sum in it
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    k = len(micro_batches)
    losses = []
    for i, (x, y) in enumerate(micro_batches):
        context = ddp_model.no_sync() if i < k - 2 else contextlib.nullcontext()
        with context:
            loss = loss_fn(ddp_model(x), y) / k
            loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
