"""Forgets zero_grad: every step has the gradients of all steps before.

loses: powersgd_train
"""


# %% replaces="task9_train"
def train(model, reducer, batches, lr, loss_fn):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for x, y in batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        reducer.reduce_gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses
