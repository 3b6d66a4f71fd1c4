"""Leaves with status 0 in the first cell; runners that stop there give full marks for the rest.

passes: nothing
"""

# %% put="first"
import os
import sys

sys.exit(0)

# %% put="after imports"
os._exit(0)
