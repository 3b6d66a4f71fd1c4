"""Counts the state of the first parameter group.

loses: fsdp_memory_measured
"""


# %% replaces="task2_measure"
def local_bytes(
    params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state in this rank's memory."""

    def size(t: torch.Tensor) -> int:
        if isinstance(t, DTensor):
            t = t.to_local()
        return t.numel() * t.element_size()

    params = list(dict.fromkeys(params))
    own = sum(size(p) for p in params)
    grads = sum(size(p.grad) for p in params if p.grad is not None)
    state = 0
    for entries in (
        optimizer.state[p] for p in optimizer.param_groups[0]["params"] if p in optimizer.state
    ):
        for value in entries.values():
            if isinstance(value, torch.Tensor):
                state += size(value)
    return own, grads, state
