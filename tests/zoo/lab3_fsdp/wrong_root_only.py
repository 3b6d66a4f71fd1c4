"""Calls fully_shard on the model only: one unit.

loses: fsdp_fully_shard
class: example
"""


# %% replaces="task4_fully_shard"
def policies(device_type: str, mixed: bool, offload: bool) -> dict[str, object]:
    """Keyword arguments for fully_shard: mp_policy and offload_policy."""
    precision = MixedPrecisionPolicy()
    if mixed:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": where}


def shard_model(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, **options: object
) -> nn.Module:
    """The model, each unit sharded on its own over the mesh's ranks."""
    fully_shard(model, mesh=mesh, reshard_after_forward=True, **options)
    return model
