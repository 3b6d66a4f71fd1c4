"""One flat vector for everything: gradients, parameters, buffers.

loses: nothing
"""


# %% replaces="mend_2"
def train_step(model, optimizer, loss_fn, x, y):
    loss = loss_fn(model(x), y) / dist.get_world_size()  # divided before, so the sum is the mean
    params = list(model.parameters())
    vector = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])
    dist.all_reduce(vector)
    for p, part in zip(params, vector.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    optimizer.step()


# %% replaces="mend_6"
def broadcast_model(model):
    tensors = [*model.parameters(), *model.buffers()]
    vector = torch.cat([t.detach().double().flatten() for t in tensors])
    dist.broadcast(vector, src=0)
    with torch.no_grad():
        for t, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))
