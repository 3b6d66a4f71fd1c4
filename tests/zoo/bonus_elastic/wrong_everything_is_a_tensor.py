"""Fails where an entry of the state is a plain number.

loses: elastic_reshard, elastic_own
because: the function raises, so there are neither parts nor their sizes.
"""


# %% replaces="task4_reshard"
def reshard(states: list[dict], numel: int, num_ranks: int) -> list[dict]:
    """The states of `num_ranks` ranks, from those of an old job."""
    ### BEGIN SOLUTION
    size = -(-numel // num_ranks)
    fresh: list[dict] = [{} for _ in range(num_ranks)]
    for name, value in states[0].items():
        parts = [copy.deepcopy(value) for _ in fresh]
        if value.dim() > 0:
            padded = value.new_zeros(num_ranks * size)
            padded[:numel] = torch.cat([state[name] for state in states])[:numel]
            parts = [part.clone() for part in padded.split(size)]
        for state, part in zip(fresh, parts, strict=True):
            state[name] = part
    return fresh
    ### END SOLUTION
