"""Steps when i % k == 0, with i counted from 0: after the first batch already.

loses: accum_steps, accum_tail
because: all groups are shifted by one, so that the last batches are lost
class: example
says: accum_tail the last optimizer step took in batches
"""


# %% replaces="task2_train_epoch"
def train_epoch(
    model, batches, loss_fn, optimizer, *, accumulation_steps, max_norm=None, scheduler=None
):
    steps = 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        loss = loss_fn(model(x), y) / accumulation_steps
        loss.backward()
        if i % accumulation_steps == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            steps += 1
    return steps
