"""The old padding stays where it was.

loses: elastic_reshard
class: example
"""


# %% replaces="task4_reshard"
def reshard(states: list[dict], numel: int, num_ranks: int) -> list[dict]:
    """The states of `num_ranks` ranks, from those of an old job."""
    size = -(-numel // num_ranks)
    fresh: list[dict] = [{} for _ in range(num_ranks)]
    for name, value in states[0].items():
        parts = [copy.deepcopy(value) for _ in fresh]
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            padded = value.new_zeros(num_ranks * size)
            joined = torch.cat([state[name] for state in states])[: len(padded)]
            padded[: len(joined)] = joined
            parts = [part.clone() for part in padded.split(size)]
        for state, part in zip(fresh, parts, strict=True):
            state[name] = part
    return fresh
