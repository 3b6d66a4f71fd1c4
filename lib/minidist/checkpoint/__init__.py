"""Checkpoints that survive the failures of training jobs.

- `Checkpoints` saves atomically and with checksums, and loads the newest undamaged one (`store`).
- State that is the same on all ranks is written once, each rank's own state once per rank.
- What `save` accepts, `load` reads; `save_async` takes a copy of everything first (`snapshot`).
- `Shard` says which part of a global tensor a rank holds; a checkpoint written by 4 ranks is read
  by 2 or 3, or by a different layout of data and tensor parallelism (`shards`).
- `save_dcp` and `load_dcp` do the same with torch.distributed.checkpoint (`native`).

Example, on every rank::

    checkpoints = Checkpoints("run1/checkpoints", keep=2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = checkpoints.load(shared=state, local={"rng": rng}) or 0
    while step < 1000:
        ...
        step += 1
        if step % 100 == 0:
            checkpoints.save(step, shared=state, local={"rng": rng})
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
