"""Divides in whole numbers.

loses: fsdp_choice
"""


# %% replaces="task8_choice"
def traffic_per_rank(
    num_params: int, world_size: int, strategy: str, bytes_per_number: int = 4
) -> float:
    """Bytes that a rank sends in a step."""
    passes = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}[strategy]
    total = num_params * bytes_per_number
    return passes * (world_size - 1) * total // world_size


def choose_strategy(
    num_params: int, world_size: int, budget_bytes: int, mixed: bool = False
) -> str:
    """The strategy with the least sharding that fits."""
    shard = -(-num_params // world_size)
    costs = (2, 2, 12) if mixed else (4, 4, 8)
    for stage, name in enumerate(("ddp", "zero1", "zero2", "zero3")):
        whole_parts, shard_parts = costs[: 3 - stage], costs[3 - stage :]
        if sum(whole_parts) * num_params + sum(shard_parts) * shard <= budget_bytes:
            return name
    return "offload"
