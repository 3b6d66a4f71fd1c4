"""Counts a parameter as often as it was given.

loses: zero_groups
"""


# %% replaces="task2_groups"
def trainable_groups(params):
    entries = list(params)
    if not any(isinstance(entry, dict) for entry in entries):
        entries = [{"params": entries}]
    seen = set()
    groups = []
    for entry in entries:
        inside = entry["params"]
        kept = []
        for parameter in [inside] if isinstance(inside, torch.Tensor) else inside:
            if parameter.requires_grad:
                seen.add(id(parameter))
                kept.append(parameter)
        if kept:
            groups.append(entry | {"params": kept})
    return groups
