"""Weighs each micro-batch by its share of the samples, and divides by their number as well.

loses: accum_scale
says: accum_scale It was divided by their number twice
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    k = len(micro_batches)
    n = sum(len(x) for x, _ in micro_batches)
    losses = []
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) * len(x) / n
        losses.append(loss.item())
        (loss / k).backward()
    return sum(losses)
