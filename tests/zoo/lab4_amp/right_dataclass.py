"""A dataclass whose fields are the state; MIN of "all finite" as an integer.

loses: nothing
"""

# %% replaces="task2_scaler"
from dataclasses import asdict, dataclass


@dataclass
class LossScaler:
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    streak: int = 0
    finite: bool | None = None

    def get_scale(self):
        return float(self.init_scale)

    def scale(self, loss):
        return loss.float().mul(self.init_scale)

    def unscale_(self, optimizer):
        if self.finite is not None:
            raise RuntimeError("unscaled already")
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        for p in params:
            p.grad /= self.init_scale
        ok = torch.stack([torch.isfinite(p.grad).all() for p in params]).all().to(torch.uint8)
        dist.all_reduce(ok, op=dist.ReduceOp.MIN)
        self.finite = bool(ok)

    def step(self, optimizer):
        if self.finite is None:
            self.unscale_(optimizer)
        if self.finite:
            optimizer.step()
        return self.finite

    def update(self):
        finite, self.finite = self.finite, None
        if finite is False:
            self.init_scale, self.streak = self.init_scale * self.backoff_factor, 0
            return
        self.streak += 1
        if not self.streak % self.growth_interval:
            self.init_scale, self.streak = self.init_scale * self.growth_factor, 0

    def state_dict(self):
        return asdict(self)

    def load_state_dict(self, state):
        for name, value in state.items():
            setattr(self, name, value)
