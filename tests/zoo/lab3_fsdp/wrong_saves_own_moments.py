"""Rank 0 saves AdamW's state of its own shards only; loading pieces it together by luck.

loses: fsdp_save
"""


# %% replaces="task6_checkpoint"
def save_checkpoint(model, optimizer, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer)
    for kept in state["state"].values():
        for key, value in kept.items():
            kept[key] = value.to_local() if isinstance(value, DTensor) else value
    if dist.get_rank() == 0:
        torch.save({"model": whole, "optimizer": state}, path)


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(path, map_location="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
