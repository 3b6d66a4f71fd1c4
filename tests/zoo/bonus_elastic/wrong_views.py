"""The parts are views of the whole vector.

loses: elastic_own
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
            padded[:numel] = torch.cat([state[name] for state in states])[:numel]
            parts = list(padded.split(size))
        for state, part in zip(fresh, parts, strict=True):
            state[name] = part
    return fresh
