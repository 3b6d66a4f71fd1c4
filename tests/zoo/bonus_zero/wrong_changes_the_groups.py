"""Writes its lists into the caller's dicts.

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
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                kept.append(parameter)
        if kept:
            entry["params"] = kept
            groups.append(entry)
    return groups
