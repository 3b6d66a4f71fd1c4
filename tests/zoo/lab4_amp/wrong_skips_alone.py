"""Only the rank that overflowed leaves the step out, so the weights drift apart.

loses: amp_scaler_agrees, amp_scaler_finds
misses: overflow-handling
because: whoever takes a step in which one rank overflows has not found it, either
class: example
"""


# %% replaces="task2_scaler"
class LossScaler:
    def __init__(
        self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        self.s = init_scale
        self.growth, self.backoff, self.interval = growth_factor, backoff_factor, growth_interval
        self.count = 0
        self.found = None

    def get_scale(self):
        return float(self.s)

    def scale(self, loss):
        return loss.float() * self.s

    def unscale_(self, optimizer):
        if self.found is not None:
            raise RuntimeError("unscale_ was called twice")
        bad = torch.zeros(1, device=optimizer.param_groups[0]["params"][0].device)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not torch.isfinite(p.grad).all():
                        bad.fill_(1)
                    p.grad.mul_(1 / self.s)
        self.found = bad.item() > 0

    def step(self, optimizer):
        if self.found is None:
            self.unscale_(optimizer)
        if not self.found:
            optimizer.step()
        return not self.found

    def update(self):
        if self.found:
            self.s *= self.backoff
            self.count = 0
        else:
            self.count += 1
            if self.count >= self.interval:
                self.s *= self.growth
                self.count = 0
        self.found = None

    def state_dict(self):
        return {k: v for k, v in vars(self).items() if k != "found"}

    def load_state_dict(self, state):
        vars(self).update(state)
