"""A class per call; the input's gradient leaves from a hook, while the backward pass goes on.

loses: nothing
"""


# %% replaces="task4_pipeline"
class Border:
    def __init__(self, stage, micro_batches, targets, loss_fn, buffer):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.stage, self.given, self.targets = stage, micro_batches, targets
        self.loss_fn, self.buffer = loss_fn, buffer
        self.outputs, self.handles, self.loss = {}, [], 0.0
        self.is_last = self.rank == self.size - 1

    def send(self, tensor, peer):
        self.handles.append(dist.isend(tensor.contiguous(), peer))

    def forward(self, i):
        if self.rank == 0:
            x = self.given[i]
        else:
            x = self.buffer(i)
            dist.recv(x, self.rank - 1)
            x.requires_grad_().register_hook(lambda grad: self.send(grad, self.rank - 1))
        y = self.stage(x)
        if self.is_last:
            total = sum(len(target) for target in self.targets)
            y = len(self.targets[i]) / total * self.loss_fn(y, self.targets[i])
            self.loss += y.item()
        else:
            self.send(y.detach(), self.rank + 1)
        self.outputs[i] = y

    def backward(self, i):
        y = self.outputs.pop(i)
        if self.is_last:
            y.backward()
        else:
            gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device)
            dist.recv(gradient, self.rank + 1)
            y.backward(gradient)


def run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer):
    border = Border(stage, micro_batches, targets, loss_fn, buffer)
    for what, i in schedule:
        getattr(border, what)(i)
    for handle in border.handles:
        handle.wait()
    loss = torch.tensor([border.loss], device=next(stage.parameters()).device)
    dist.all_reduce(loss)  # zero everywhere but on the last rank
    return loss[0]


# %% replaces="task5_train"
def train_step(stage, optimizer, *given):
    optimizer.zero_grad(set_to_none=False)
    loss = run_pipeline(stage, *given[:0], *given)
    optimizer.step()
    return loss
