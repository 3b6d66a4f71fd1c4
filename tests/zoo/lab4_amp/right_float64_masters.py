"""Masters in fp64, made by hand for each parameter; the hook blocks, and returns a done future.

loses: nothing
"""


# %% replaces="task7_masters"
class MasterWeights:
    def __init__(self, params, make_optimizer):
        self.pairs = [(p, p.detach().double().requires_grad_(True)) for p in params]
        self.optimizer = make_optimizer([wide for _, wide in self.pairs])

    def step(self):
        for p, wide in self.pairs:
            wide.grad = p.grad.double() if p.grad is not None else None
        self.optimizer.step()
        for p, wide in self.pairs:
            p.data.copy_(wide.data)

    def zero_grad(self):
        for p, _ in self.pairs:
            if p.grad is not None:
                p.grad.zero_()


# %% replaces="task8_hook"
def make_compress_hook(dtype):
    def hook(state, bucket):
        tensor = bucket.buffer().div(dist.get_world_size()).to(dtype)
        dist.all_reduce(tensor)
        done = torch.futures.Future()
        done.set_result(bucket.buffer().copy_(tensor))
        return done

    return hook
