"""step() forgets that gradients are unscaled: an unscale_ after it divides again.

loses: amp_scaler_unscale
"""


# %% replaces="task2_scaler"
class LossScaler:
    """Scales the loss, unscales gradients, leaves out steps that overflow on any rank."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        """Remembers the settings; no step has been taken."""
        self.current = float(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good = 0
        self.overflow: bool | None = None

    def get_scale(self) -> float:
        """The scale."""
        return self.current

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss.float() * self.current

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and learns whether any rank overflowed."""
        if self.overflow is not None:
            raise RuntimeError("unscale_ was called twice before update()")
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        bad = torch.zeros(1, device=grads[0].device)
        for grad in grads:
            grad.div_(self.current)
            if not torch.isfinite(grad).all():
                bad.fill_(1.0)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        self.overflow = bad.item() > 0

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes the step if all gradients of all ranks are finite; True if it was taken."""
        if self.overflow is None:
            self.unscale_(optimizer)
        self.skipped, self.overflow = self.overflow, None
        if self.skipped:
            return False
        optimizer.step()
        return True

    def update(self) -> None:
        """Backs off after an overflow, grows after enough good steps."""
        if self.skipped:
            self.current *= self.backoff_factor
            self.good = 0
        else:
            self.good += 1
            if self.good == self.growth_interval:
                self.current *= self.growth_factor
                self.good = 0
        self.overflow = None

    def state_dict(self) -> dict[str, float]:
        """All that a checkpoint needs."""
        return {
            "scale": self.current,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "good": self.good,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where the saved scaler was."""
        self.current = state["scale"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self.good = state["good"]
        self.overflow = None
