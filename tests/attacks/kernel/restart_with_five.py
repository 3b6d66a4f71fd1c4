"""Asks the kernel for five ranks where the referee knows three: none of them could start.

base: reference
passes: everything
"""

# %% put="after imports"
# %restart_ranks 5

# %% put="after task1_setup"
# %ranks
# %restart_ranks 1 --rerun

# %% put="after task2_wrap"
# %restart_ranks 5
# %%rank 4
print("never")
