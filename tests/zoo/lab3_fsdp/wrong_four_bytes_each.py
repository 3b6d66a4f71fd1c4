"""Every number has four bytes: a bf16 model counts double, float64 half.

loses: fsdp_memory_measured
"""


# %% replaces="task2_measure"
def local_bytes(
    params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state in this rank's memory."""

    ### BEGIN SOLUTION
    def count(tensor: torch.Tensor) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return 4 * local.numel()

    once = list(dict.fromkeys(params))
    states = (value for state in optimizer.state.values() for value in state.values())
    return (
        sum(count(p) for p in once),
        sum(count(p.grad) for p in once if p.grad is not None),
        sum(count(value) for value in states if isinstance(value, torch.Tensor)),
    )
    ### END SOLUTION
