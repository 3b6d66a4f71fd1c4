"""Data parallelism: every rank holds the whole model and a part of the batch.

Read in this order; each file makes one step:

    replicas.py         equal models at the start
    naive.py            one all-reduce per parameter, after backward
    flat.py             one all-reduce of everything, after backward
    overlapped.py       one all-reduce per parameter, during backward
    buckets.py          gradients that travel together
    graph.py            parameters that get no gradient
    bucketed.py         the complete version: buckets, during backward, for any model
    join.py             ranks that run out of data earlier than others
    clipping.py         gradient norms
    sync_batch_norm.py  BatchNorm over the batches of all ranks
    native.py           torch's DistributedDataParallel and its options
    legacy.py           DataParallel: one process, and why DDP replaced it
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
