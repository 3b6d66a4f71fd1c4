"""Takes the size of the first micro-batch for that of all.

loses: accum_unequal
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    num_samples = len(micro_batches) * len(micro_batches[0][0])
    loss_sum, true_samples = 0.0, 0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        (loss * len(x) / num_samples).backward()
        loss_sum += loss.item() * len(x)
        true_samples += len(x)
    return loss_sum / true_samples
