"""Looks at the name of the strategy only where there is something to shard.

loses: fsdp_memory_formula
"""

# %% replaces="task1_formula"
STAGES = ("ddp", "zero1", "zero2", "zero3")


def bytes_per_rank(
    num_params: int, world_size: int, strategy: str, mixed: bool = False
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that a rank holds."""
    if world_size == 1:
        return (
            (2 * num_params, 2 * num_params, 12 * num_params)
            if mixed
            else (4 * num_params, 4 * num_params, 8 * num_params)
        )
    if strategy not in STAGES:
        raise ValueError(f"strategy is {strategy!r}, expected one of {STAGES}")
    stage = STAGES.index(strategy)
    shard = -(-num_params // world_size)
    costs = (2, 2, 12) if mixed else (4, 4, 8)
    return (
        costs[0] * (shard if stage >= 3 else num_params),
        costs[1] * (shard if stage >= 2 else num_params),
        costs[2] * (shard if stage >= 1 else num_params),
    )
