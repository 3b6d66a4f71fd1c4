"""Ranks agree in step(), not in unscale_(), by gathering everybody's flag; the scale is a tensor.

loses: nothing
"""


# %% replaces="task2_scaler"
class LossScaler:
    def __init__(
        self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        self.tensor = torch.tensor(float(init_scale), dtype=torch.float64)
        self.settings = (growth_factor, backoff_factor, growth_interval)
        self.tracker = 0
        self.unscaled = False

    def get_scale(self):
        return self.tensor.item()

    def scale(self, loss):
        return loss * self.tensor.to(loss.device)

    def unscale_(self, optimizer):
        if self.unscaled:
            raise RuntimeError("gradients are unscaled already")
        self.unscaled = True
        self.bad = False
        for group in optimizer.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                # Times 0 is 0 for finite numbers and nan for all others.
                self.bad |= not bool((p.grad * 0 == 0).all())
                p.grad.div_(self.tensor.to(p.grad))

    def step(self, optimizer):
        if not self.unscaled:
            self.unscale_(optimizer)
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self.bad)
        self.bad = any(everybody)
        if self.bad:
            return False
        optimizer.step()
        return True

    def update(self):
        growth, backoff, interval = self.settings
        self.tracker = 0 if self.bad else self.tracker + 1
        if self.bad:
            self.tensor.mul_(backoff)
        elif self.tracker == interval:
            self.tensor.mul_(growth)
            self.tracker = 0
        self.unscaled = False

    def state_dict(self):
        return {"a": self.get_scale(), "b": list(self.settings), "c": self.tracker}

    def load_state_dict(self, state):
        self.tensor.fill_(state["a"])
        self.settings, self.tracker = tuple(state["b"]), state["c"]
