"""Divides each loss by the number of micro-batches, also where they differ in size.

loses: accum_unequal
class: example
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    steps = len(micro_batches)
    reported = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) / steps
        loss.backward()
        reported += loss.item()
    return reported
