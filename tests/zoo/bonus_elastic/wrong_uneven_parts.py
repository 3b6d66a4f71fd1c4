"""Cuts without padding: the last part is shorter.

loses: elastic_reshard
"""

# ruff: noqa: F821


# %% replaces="task4_reshard"
def reshard(states: list[dict], numel: int, num_ranks: int) -> list[dict]:
    """The states of `num_ranks` ranks, from those of an old job."""
    size = -(-numel // num_ranks)
    fresh: list[dict] = [{} for _ in range(num_ranks)]
    for name, value in states[0].items():
        parts = [copy.deepcopy(value) for _ in fresh]
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            joined = torch.cat([state[name] for state in states])[:numel]
            parts = [joined[r * size : (r + 1) * size].clone() for r in range(num_ranks)]
        for state, part in zip(fresh, parts, strict=True):
            state[name] = part
    return fresh
