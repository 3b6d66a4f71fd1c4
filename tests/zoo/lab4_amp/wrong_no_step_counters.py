"""Leaves out AdamW's step counters.

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
    own = {p.untyped_storage().data_ptr() for p in params}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()
    loss.backward()
    gradients = sum(p.grad.nbytes for p in params if p.grad is not None)
    optimizer.step()
    state = 0
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor) and value.dim():
                state += value.nbytes
    return {
        "parameters": sum(p.nbytes for p in params),
        "gradients": gradients,
        "optimizer": state,
        "saved": sum(saved.values()),
    }
