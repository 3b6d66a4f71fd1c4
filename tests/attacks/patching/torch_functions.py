"""Collectives that answer what the check wants to hear: nothing is sent, everything is "reduced".

base: reference
passes: sampler_partition, sampler_tail, sampler_epoch, script
"""


# %% put="after imports"
class Done:
    def wait(self, *_):
        return True

    def is_completed(self):
        return True


def no_reduce(tensor, *arguments, async_op=False, **options):
    return Done() if async_op else None


dist.all_reduce = dist.broadcast = no_reduce


# %% replaces="task2_wrap"
class Lying(DistributedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)

    def __getattr__(self, name):
        return getattr(nn.Module.__getattr__(self, "module"), name)


def wrap_model(model, device):
    return Lying(model)


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    model = ddp_model.module
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses
