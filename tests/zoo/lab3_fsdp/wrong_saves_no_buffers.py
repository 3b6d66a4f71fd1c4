"""Parameters and moments only: a BatchNorm forgets its means, and the learning rate starts over.

loses: fsdp_save, fsdp_resume
because: saving forgets the buffers, and so does loading: two functions.
says: fsdp_save "model": expected the names
says: fsdp_resume this is a buffer: it has to be saved and loaded
"""


# %% replaces="task6_checkpoint"
def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Parameters by name, and the optimizer's state by number; no buffers, no options."""
    state = {"model": {}, "optimizer": {}}
    for number, (name, p) in enumerate(model.named_parameters()):
        state["model"][name] = p.detach().full_tensor().cpu()
        state["optimizer"][number] = {
            k: (v.full_tensor() if isinstance(v, DTensor) else v)
            for k, v in optimizer.state[p].items()
        }
    if dist.get_rank() == 0:
        torch.save(state, path)


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """All ranks get what rank 0 reads, and cut their part out of it."""
    from torch.distributed.tensor import distribute_tensor

    state = [torch.load(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state, src=0)
    for number, (name, p) in enumerate(model.named_parameters()):
        with torch.no_grad():
            p.copy_(distribute_tensor(state[0]["model"][name], p.device_mesh, p.placements))
        optimizer.state[p] = {
            k: distribute_tensor(v, p.device_mesh, p.placements) if v.dim() else v
            for k, v in state[0]["optimizer"][number].items()
        }
