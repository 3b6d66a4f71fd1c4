"""Adds up the gradients of all micro-batches and never divides: k times too large.

loses: accum_scale, accum_unequal
misses: accumulation
because: without weights, sizes count for nothing either
class: example
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    total, samples = 0.0, 0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        total += loss.item() * len(x)
        samples += len(x)
    return total / samples
