"""Forgets that the other ranks of the node start workers as well.

loses: prof_loader_settings
"""


# %% replaces="task4_settings"
def loader_settings(load_s, step_s, cores, ranks_per_node, device):
    workers = min(math.ceil(load_s / step_s), cores)
    return dict(
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
    )
