"""All-reduces the loss of every micro-batch for the log.

loses: accum_ddp_collectives
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    k, seen = len(micro_batches), []
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y)
            (loss / k).backward()
        log = loss.detach().clone()
        dist.all_reduce(log)
        seen.append(log.item() / dist.get_world_size())
    return sum(seen) / k
