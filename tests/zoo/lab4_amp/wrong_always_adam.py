"""Takes two states per parameter for granted.

loses: amp_memory
"""


# %% replaces="task4_memory"
def memory_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_loss: Callable[[], torch.Tensor],
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and saved activations of one step."""
    params = list(model.parameters())
    owned = {p.untyped_storage().data_ptr() for p in params}
    saved: dict[int, int] = {}  # address of a storage -> its bytes

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()
    loss.backward()
    optimizer.step()

    return {
        "parameters": sum(p.nbytes for p in params),
        "gradients": sum(p.grad.nbytes for p in params if p.grad is not None),
        "optimizer": 2 * sum(p.nbytes for p in params if p.grad is not None),
        "saved": sum(saved.values()),
    }
