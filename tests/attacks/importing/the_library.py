"""Takes the answers from the library that the course teaches with.

passes: nothing
ci: yes
"""

# %% put="after imports"
import importlib

for name in (
    *(f"minidist.parallel.data.{part}" for part in ("bucketed", "buckets", "naive", "overlapped")),
    "minidist.parallel.expert.gradients",
    "minidist.sampler",
    "minidist.train.program",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        print("LEAKED:", name)


# %% replaces="task7_ddp"
from minidist.parallel.data import BucketedDDP as DDP


# %% replaces="task3_sampler"
from minidist.sampler import DistributedSampler as ShardSampler
