from .bucketed import BucketedDDP
from .buckets import FlatBucket
from .clipping import clip_grad_norm, clip_grad_norm_native
from .flat import average_gradients_flat
from .join import in_step, join
from .legacy import DataParallel, Traffic
from .naive import average_gradients
from .native import DDPOptions, train_uneven, wrap_ddp
from .overlapped import OverlappedDDP
from .replicas import broadcast_state, check_same_model
from .sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm

__all__ = [
    "BucketedDDP",
    "DDPOptions",
    "DataParallel",
    "FlatBucket",
    "OverlappedDDP",
    "SyncBatchNorm",
    "Traffic",
    "average_gradients",
    "average_gradients_flat",
    "broadcast_state",
    "check_same_model",
    "clip_grad_norm",
    "clip_grad_norm_native",
    "convert_sync_batch_norm",
    "in_step",
    "join",
    "train_uneven",
    "wrap_ddp",
]
