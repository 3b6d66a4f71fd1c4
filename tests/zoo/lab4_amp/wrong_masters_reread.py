"""Makes the fp32 copies anew from the 16-bit parameters at every step: what was gathered is lost.

loses: amp_masters
class: example
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
            master.copy_(p)
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters):
            p.copy_(master)

    def zero_grad(self):
        for p in self.params:
            p.grad = None
