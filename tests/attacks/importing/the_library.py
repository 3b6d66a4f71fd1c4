"""Takes the answers from the library that the course teaches with.

passes: nothing
ci: yes
"""

# %% put="after imports"
import importlib

for name in (
    "minidist.parallel",
    "minidist.parallel.data",
    "minidist.sampler",
    "minidist.train",
    "minidist.parallel.fsdp",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        print("LEAKED:", name)


# %% replaces="task7_ddp"
from minidist.parallel.data import DDP


# %% replaces="task3_sampler"
from minidist.sampler import DistributedSampler as ShardSampler
