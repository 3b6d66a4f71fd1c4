"""Right, with magics: timing, plots, shell commands, a cell on one rank.

base: reference
"""

# %% put="after imports"
# %matplotlib inline
# %load_ext autoreload
# %autoreload 2
# %time _ = sum(range(1000))
# !echo from the shell
# %precision 3
_files = None

# %% put="after imports"
# %%time
_total = sum(range(10))

# %% put="after imports"
# %%rank 1
print("only here")

# %% put="after imports"
# %%bash
# echo from bash
