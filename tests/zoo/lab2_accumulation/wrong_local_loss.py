"""Returns the loss of the rank's own samples.

loses: accum_ddp_loss
says: accum_ddp_loss That is this rank's own loss: average it
"""


# %% replaces="task3_accumulate_ddp"
def accumulate_ddp(ddp_model, micro_batches, loss_fn):
    k, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y) / k
            loss.backward()
        total += loss.item()
    return total
