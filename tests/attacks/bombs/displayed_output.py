"""Displays ninety megabytes, cell after cell, each within the bounds of a cell.

passes: nothing
"""

# %% put="after imports"
display({"text/plain": "a" * (28 << 20)}, raw=True)

# %% put="after imports"
display({"text/plain": "b" * (28 << 20)}, raw=True)

# %% put="after imports"
display({"text/plain": "c" * (28 << 20)}, raw=True)

# %% put="after imports"
display({"text/plain": "d" * (28 << 20)}, raw=True)
