"""No master for a frozen parameter: all after it get their neighbour's.

loses: amp_masters
"""


# %% replaces="task7_masters"
class MasterWeights:
    """An optimizer for 16-bit parameters that adds up its updates in fp32 copies."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ):
        """Makes an fp32 master of each parameter, and the optimizer over the masters."""
        self.params = list(params)
        self.masters = [
            p.detach().float().clone().requires_grad_() for p in self.params if p.requires_grad
        ]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        """One step of the masters; the parameters become their rounded values."""
        for p, master in zip(self.params, self.masters, strict=False):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=False):
            p.copy_(master)

    def zero_grad(self) -> None:
        """Clears the gradients of the parameters."""
        for p in self.params:
            p.grad = None
