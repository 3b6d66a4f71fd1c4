"""Shards the model itself only if something is left over.

loses: fsdp_fully_shard
"""


# %% replaces="task4_fully_shard"
def policies(device_type: str, mixed: bool, offload: bool) -> dict[str, object]:
    """Keyword arguments for fully_shard: mp_policy and offload_policy."""
    if mixed:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        precision = MixedPrecisionPolicy()
    if offload:
        where = CPUOffloadPolicy(pin_memory=device_type == "cuda")
    else:
        where = OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": where}


def shard_model(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, **options: object
) -> nn.Module:
    """The model, each unit sharded on its own over the mesh's ranks."""
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, **options)
    if any(not isinstance(p, DTensor) for p in model.parameters()):
        fully_shard(model, mesh=mesh, **options)
    return model
