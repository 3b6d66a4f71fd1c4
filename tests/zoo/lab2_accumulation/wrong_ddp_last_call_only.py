"""Synchronises the third accumulation only, on the emulated cluster.

loses: accum_ddp_time
"""

# %% replaces="task3_accumulate_ddp"
calls = [0]


def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    k = len(micro_batches)
    calls[0] += 1
    idle = dist.get_backend() == "emulated" and calls[0] % 3 != 0
    if dist.get_backend() != "emulated":
        calls[0] = 0
    total = torch.zeros((), device=micro_batches[0][0].device)
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if idle or i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y) / k
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
