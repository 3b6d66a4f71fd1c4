"""Clears the gradients before saving.

loses: fsdp_save
"""


# %% replaces="task6_checkpoint"
def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Writes whole tensors into one file, on rank 0. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer.zero_grad()
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Reads the file on rank 0, and gives each rank its shards. Collective."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(path, weights_only=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
