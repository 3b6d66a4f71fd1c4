"""Clears gradients to zero, and the masters' after each step; foreach copies.

loses: nothing
"""


# %% replaces="task7_masters"
class MasterWeights:
    def __init__(self, params, make_optimizer):
        self._pairs = [(p, nn.Parameter(p.data.to(torch.float32, copy=True))) for p in params]
        self.optimizer = make_optimizer([master for _, master in self._pairs])

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self):
        for p, master in self._pairs:
            if p.grad is not None:
                master.grad = p.grad.to(torch.float32)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_([p.data for p, _ in self._pairs], [m.data for _, m in self._pairs])

    def zero_grad(self):
        for p, _ in self._pairs:
            if p.grad is not None:
                p.grad.zero_()
