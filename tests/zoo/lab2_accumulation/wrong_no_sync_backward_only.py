"""Only backward is inside no_sync(); DDP has decided in forward.

loses: accum_ddp_collectives, accum_ddp_time
because: what travels k times takes k times as long
class: example
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    total = 0.0
    for i, (x, y) in enumerate(micro_batches):
        loss = loss_fn(ddp_model(x), y) / len(micro_batches)
        if i + 1 < len(micro_batches):
            with ddp_model.no_sync():
                loss.backward()
        else:
            loss.backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
