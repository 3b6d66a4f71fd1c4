"""Right, with prints on every rank, progress bars and displays while it works.

base: reference
"""

# %% put="after imports"
import time

from tqdm.auto import tqdm

for _ in tqdm(range(20)):
    time.sleep(0.001)
for _percent in range(0, 101, 5):
    print(f"\r{_percent} %", end="", flush=True)
_real_broadcast = dist.broadcast


def _loud(tensor, *arguments, **options):
    print("rank", dist.get_rank(), "broadcasts", tuple(tensor.shape))
    display({"text/plain": "a display"}, raw=True)
    return _real_broadcast(tensor, *arguments, **options)


dist.broadcast = _loud
