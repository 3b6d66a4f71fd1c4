"""Right, with cells of its own: notes, scratch work, helpers, empty ones, one that raises.

base: reference
"""

# %% put="after imports"
import random
import subprocess
from collections import Counter, defaultdict


# %% put="after task3_sampler"
[list(ShardSampler(10, r, 3)) for r in range(3)]

# %% put="after task3_sampler"
1 / 0

# %% put="after task4_train"


# %% put="last"
raise SystemExit
