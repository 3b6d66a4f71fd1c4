"""Adds up the losses and calls backward once at the end.

The gradient is right, but all activations are in memory at the same time.

loses: accum_memory
status: accum_memory STUDENT_ERROR
class: example
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    n = sum(len(x) for x, _ in micro_batches)
    loss = sum(loss_fn(model(x), y) * len(x) for x, y in micro_batches) / n
    loss.backward()
    return loss.item()
