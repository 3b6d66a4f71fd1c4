"""Updates with this rank's own gradient, then reduces.

loses: powersgd_train
says: powersgd_train reduce_gradients() belongs between backward and the update
"""


# %% replaces="task9_train"
def train(model, reducer, batches, lr, loss_fn):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        reducer.reduce_gradients()
        losses.append(loss.item())
    return losses
