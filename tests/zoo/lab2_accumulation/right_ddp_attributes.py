"""Asks the wrapper for its device and its group, as torch's DDP has them.

loses: nothing
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    total = torch.zeros((), device=ddp_model.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ddp_model.no_sync())
        for x, y in micro_batches[:-1]:
            loss = loss_fn(ddp_model(x), y) / len(micro_batches)
            loss.backward()
            total += loss.detach()
    x, y = micro_batches[-1]
    loss = loss_fn(ddp_model(x), y) / len(micro_batches)
    loss.backward()
    total += loss.detach()
    dist.all_reduce(total, group=ddp_model.process_group)
    return total.item() / dist.get_world_size(ddp_model.process_group)
