"""A strategy that needs exactly the budget does not fit.

loses: fsdp_choice
"""


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
    shard = -(-num_params // world_size)
    weight, gradient, state = (2, 2, 12) if mixed else (4, 4, 8)
    needs = {
        "ddp": num_params * (weight + gradient + state),
        "zero1": num_params * (weight + gradient) + shard * state,
        "zero2": num_params * weight + shard * (gradient + state),
        "zero3": shard * (weight + gradient + state),
    }
    return next((name for name, size in needs.items() if size < budget_bytes), "offload")
