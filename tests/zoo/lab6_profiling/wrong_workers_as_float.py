"""Gives the number of workers as a float, which a DataLoader refuses later.

loses: prof_loader_settings
"""


# %% replaces="task4_settings"
def loader_settings(
    load_s: float, step_s: float, cores: int, ranks_per_node: int, device: torch.device
) -> dict:
    workers = min(float(math.ceil(load_s / step_s)), cores // ranks_per_node)
    return {
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
        "prefetch_factor": 2 if workers > 0 else None,
    }
