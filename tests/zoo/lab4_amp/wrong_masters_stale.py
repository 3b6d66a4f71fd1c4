"""A parameter without a gradient leaves its master with that of an earlier step.

loses: amp_masters
"""


# %% replaces="task7_masters"
class MasterWeights:
    def __init__(self, params, make_optimizer):
        self.params = list(params)
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.params, self.masters):
            if p.grad is not None:
                master.grad = p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters):
            p.copy_(master)

    def zero_grad(self):
        for p in self.params:
            p.grad = None
