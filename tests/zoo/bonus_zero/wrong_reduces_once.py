"""Calls reduce() after the last backward only.

loses: zero_train
status: zero_train STUDENT_ERROR
"""


# %% replaces="task8_train"
def train_step(model, optimizer, micro_batches, loss_fn, max_norm):
    total = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) / len(micro_batches)
        loss.backward()
        total += loss.item()
    optimizer.reduce()
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm
