"""i % k != 0 under no_sync: the first micro-batch is synchronised, the others never are.

loses: accum_ddp_gradients, accum_ddp_collectives, accum_ddp_backward, accum_ddp_time
because: what has been accumulated never travels
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    total = 0.0
    accumulation_steps = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        if i % accumulation_steps != 0:
            with ddp_model.no_sync():
                loss = loss_fn(ddp_model(x), y) / accumulation_steps
                loss.backward()
        else:
            loss = loss_fn(ddp_model(x), y) / accumulation_steps
            loss.backward()
        total = total + loss.detach()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
