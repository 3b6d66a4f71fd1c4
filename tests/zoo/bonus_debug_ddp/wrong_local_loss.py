"""Right gradients; the loss that it reports is that of this rank.

loses: debug_accumulate_loss
says: debug_accumulate_loss That is this rank's own loss
"""


# %% replaces="mend_4"
def accumulate(ddp_model, micro_batches, loss_fn):
    k, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y)
            (loss / k).backward()
        total += loss.detach() / k
    return total.item()
