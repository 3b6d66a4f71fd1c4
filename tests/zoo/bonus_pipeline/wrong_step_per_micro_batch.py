"""A step of the optimizer after each micro-batch.

loses: pipe_train
"""


# %% replaces="task5_train"
def train_step(stage, optimizer, schedule, micro_batches, targets, loss_fn, buffer):
    losses = []
    for i in range(len(schedule) // 2):
        optimizer.zero_grad()
        one = run_pipeline(
            stage,
            [("forward", 0), ("backward", 0)],
            micro_batches and [micro_batches[i]],
            targets and [targets[i]],
            loss_fn,
            buffer and (lambda _, i=i: buffer(i)),
        )
        losses.append(one)
        optimizer.step()
    return torch.stack(losses).mean()
