"""Gradients of all steps add up.

loses: pipe_train
class: example
"""


# %% replaces="task5_train"
def train_step(stage, optimizer, schedule, micro_batches, targets, loss_fn, buffer):
    loss = run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer)
    optimizer.step()
    return loss
