"""Combines DDP and accumulation without no_sync: right, and k times the traffic.

loses: accum_ddp_collectives, accum_ddp_backward, accum_ddp_time
because: with each wrapper, everything travels k times and takes k times as long
says: accum_ddp_backward is that inside no_sync() too?
says: accum_ddp_time so only one per accumulation pays
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    total = 0.0
    for x, y in micro_batches:
        loss = loss_fn(ddp_model(x), y) / len(micro_batches)
        loss.backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
