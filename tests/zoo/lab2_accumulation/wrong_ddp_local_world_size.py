"""Divides the loss by LOCAL_WORLD_SIZE, the ranks of one node.

loses: accum_ddp_loss
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    k = len(micro_batches)
    total = torch.zeros((), device=micro_batches[0][0].device)
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y) / k
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / int(os.environ["LOCAL_WORLD_SIZE"])
