"""Reduces by hand and divides by 2, the number of ranks on the student's own desk.

loses: accum_ddp_gradients
class: example
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    total = 0.0
    with ddp_model.no_sync():
        for x, y in micro_batches:
            loss = loss_fn(ddp_model(x), y) / len(micro_batches)
            loss.backward()
            total = total + loss.detach()
    for p in ddp_model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()
