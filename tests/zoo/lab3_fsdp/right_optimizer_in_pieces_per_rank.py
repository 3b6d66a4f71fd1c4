"""The optimizer's part of the file is a list of each rank's own pieces, scattered in loading.

loses: nothing
"""


# %% replaces="task6_checkpoint"
def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Writes whole tensors into one file, on rank 0. Collective."""

    def piece(value: object) -> object:
        if isinstance(value, DTensor):
            return {"piece": value.to_local().cpu().clone()}
        return value.cpu().clone() if isinstance(value, torch.Tensor) else value

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    mine = optimizer.state_dict()
    mine = {
        "state": {
            index: {key: piece(value) for key, value in values.items()}
            for index, values in mine["state"].items()
        },
        "param_groups": mine["param_groups"],
    }
    pieces = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, pieces, dst=0)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": pieces}, path)


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Reads the file on rank 0, and gives each rank its shards. Collective."""

    def whole(value: object, p: nn.Parameter) -> object:
        if not isinstance(value, dict):
            return value
        return DTensor.from_local(
            value["piece"].to(p.device),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )

    state = {"model": {}, "optimizer": None}
    if dist.get_rank() == 0:
        state = torch.load(path, map_location="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    received = [None]
    dist.scatter_object_list(received, state["optimizer"], src=0)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    mine = received[0]
    mine["state"] = {
        index: {key: whole(value, params[index]) for key, value in values.items()}
        for index, values in mine["state"].items()
    }
    optimizer.load_state_dict(mine)
