"""Only forward is inside no_sync(): enough for DDP, not for what decides in backward.

loses: accum_ddp_backward
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    total = 0.0
    for i, (x, y) in enumerate(micro_batches):
        if i + 1 < len(micro_batches):
            with ddp_model.no_sync():
                output = ddp_model(x)
        else:
            output = ddp_model(x)
        loss = loss_fn(output, y) / len(micro_batches)
        loss.backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
