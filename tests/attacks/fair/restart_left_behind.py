"""Right, with the cells that asked for fresh ranks during the work left in the notebook.

base: reference
"""

# %% put="first"
# %restart_ranks

# %% put="after task3_sampler"
# %restart_ranks 2
print("on two ranks again")

# %% put="after task6_in_sync"
# %restart_ranks --rerun
