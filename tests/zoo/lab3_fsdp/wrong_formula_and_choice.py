"""Eight bytes of optimizer state in mixed precision; the choice uses the same function.

loses: fsdp_memory_formula
"""


# %% replaces="task1_formula"
def bytes_per_rank(
    num_params: int, world_size: int, strategy: str, mixed: bool = False
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that a rank holds."""
    strategies = ("ddp", "zero1", "zero2", "zero3")
    if strategy not in strategies:
        raise ValueError(f"strategy: expected one of {strategies}, got {strategy!r}")
    stage = strategies.index(strategy)
    per_param = (2, 2, 8) if mixed else (4, 4, 8)
    shard = -(-num_params // world_size)
    # Stage 1 shards the optimizer's state, 2 the gradients as well, 3 also the parameters.
    needed_stage = (3, 2, 1)
    counts = [shard if stage >= needed else num_params for needed in needed_stage]
    parameters, gradients, optimizer = (c * b for c, b in zip(counts, per_param, strict=True))
    return parameters, gradients, optimizer


# %% replaces="task8_choice"
def traffic_per_rank(
    num_params: int, world_size: int, strategy: str, bytes_per_number: int = 4
) -> float:
    """Bytes that a rank sends in a step."""
    passes = 3 if strategy == "zero3" else 2
    return passes * (world_size - 1) / world_size * num_params * bytes_per_number


def choose_strategy(
    num_params: int, world_size: int, budget_bytes: int, mixed: bool = False
) -> str:
    """The strategy with the least sharding that fits."""
    for name in ("ddp", "zero1", "zero2", "zero3"):
        if sum(bytes_per_rank(num_params, world_size, name, mixed)) <= budget_bytes:
            return name
    return "offload"
