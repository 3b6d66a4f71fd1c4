"""Takes the settings that a lecture recommends: four workers, pinned memory, whatever the
machine.

loses: prof_loader_settings
"""


# %% replaces="task4_settings"
def loader_settings(load_s, step_s, cores, ranks_per_node, device):
    return dict(num_workers=4, pin_memory=True, persistent_workers=True, prefetch_factor=2)
