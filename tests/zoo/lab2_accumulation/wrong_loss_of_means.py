"""The gradient is right; the loss is the mean of the micro-batches' means.

loses: accum_loss
"""


# %% replaces="task1_accumulate"
def accumulate_gradients(model, micro_batches, loss_fn):
    num_samples = sum(len(x) for x, _ in micro_batches)
    losses = []
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        (loss * len(x) / num_samples).backward()
        losses.append(loss.item())
    return sum(losses) / len(losses)
