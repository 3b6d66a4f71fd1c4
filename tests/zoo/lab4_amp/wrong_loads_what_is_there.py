"""Keeps its own count of good steps where the saved one is 0 or larger.

loses: amp_scaler_state
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
        self.current = init_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0  # in a row, since the scale changed
        self.overflow: bool | None = None  # None: this step's gradients are still scaled

    def get_scale(self) -> float:
        """The scale."""
        return self.current

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss.float() * self.current

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and learns whether any rank overflowed."""
        if self.overflow is not None:
            raise RuntimeError("unscale_() was called already since the last update()")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]

        finite = torch.stack([torch.isfinite(grad).all() for grad in grads]).all()
        for grad in grads:
            grad.div_(self.current)

        # One decision for all ranks, or their weights drift apart.
        flag = (~finite).float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.overflow = bool(flag.item())

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes the step if all gradients of all ranks are finite; True if it was taken."""
        if self.overflow is None:
            self.unscale_(optimizer)
        if self.overflow:
            return False
        optimizer.step()
        return True

    def update(self) -> None:
        """Backs off after an overflow, grows after enough good steps."""
        if self.overflow:
            self.current *= self.backoff_factor
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.current *= self.growth_factor
                self.good_steps = 0
        self.overflow = None

    def state_dict(self) -> dict[str, float]:
        """All that a checkpoint needs."""
        return {
            "scale": self.current,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "good_steps": self.good_steps,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where the saved scaler was."""
        self.current = state["scale"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = int(state["growth_interval"])
        self.good_steps = max(self.good_steps, int(state["good_steps"]))
