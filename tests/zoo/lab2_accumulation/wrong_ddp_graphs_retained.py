"""Retains every graph and keeps the losses, so no activation is freed.

loses: accum_ddp_collectives
says: accum_ddp_collectives unless it retains the graph
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    k = len(micro_batches)
    losses = []
    for i, (x, y) in enumerate(micro_batches):
        context = ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext()
        with context:
            loss = loss_fn(ddp_model(x), y) / k
            loss.backward(retain_graph=True)
        losses.append(loss)
    total = torch.stack(losses).sum().detach()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
