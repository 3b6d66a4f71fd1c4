"""One worker too many where the load is an exact multiple of the step.

loses: prof_loader_settings
"""


# %% replaces="task4_settings"
def loader_settings(
    load_s: float, step_s: float, cores: int, ranks_per_node: int, device: torch.device
) -> dict:
    """Keyword arguments for a DataLoader that keeps up, if the cores allow it."""
    ### BEGIN SOLUTION
    workers = min(int(load_s / step_s) + 1, cores // ranks_per_node)
    return {
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
        "prefetch_factor": 2 if workers > 0 else None,
    }
    ### END SOLUTION
