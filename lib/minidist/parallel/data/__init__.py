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

from minidist.collectives.replicas import broadcast_tensors
from minidist.parallel.data.bucketed import BucketedDDP
from minidist.parallel.data.buckets import Bucket, assign_buckets
from minidist.parallel.data.clipping import clip_grad_norm, clip_grad_norm_native
from minidist.parallel.data.flat import average_gradients_flat
from minidist.parallel.data.join import join
from minidist.parallel.data.legacy import DataParallel, Traffic
from minidist.parallel.data.naive import average_gradients
from minidist.parallel.data.native import DDPOptions, train_uneven, wrap_ddp
from minidist.parallel.data.overlapped import OverlappedDDP
from minidist.parallel.data.replicas import broadcast_state, check_same_model
from minidist.parallel.data.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm

__all__ = [
    "Bucket",
    "BucketedDDP",
    "DDPOptions",
    "DataParallel",
    "OverlappedDDP",
    "SyncBatchNorm",
    "Traffic",
    "assign_buckets",
    "average_gradients",
    "average_gradients_flat",
    "broadcast_state",
    "broadcast_tensors",
    "check_same_model",
    "clip_grad_norm",
    "clip_grad_norm_native",
    "convert_sync_batch_norm",
    "join",
    "train_uneven",
    "wrap_ddp",
]
