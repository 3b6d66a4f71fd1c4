"""Which tensors travel together: the one policy of data parallelism and ZeRO.

>>> weights = [torch.zeros(100) for _ in range(5)]                        # 400 bytes each
>>> cut_into_buckets(weights, bucket_bytes=1000)
[[0, 1], [2, 3], [4]]
>>> cut_into_buckets(weights, bucket_bytes=1000, first_bucket_bytes=400)
[[0], [1, 2], [3, 4]]

The bucket size is a trade-off: large buckets pay the latency less often, small buckets start
earlier. The first bucket may be smaller, because nothing overlaps until it starts. Li et al. (arXiv
2006.15704), 3.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cut_into_buckets(
    tensors: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int | None = None
) -> list[list[int]]:
    """Group tensors, given in the order in which they can be sent.

    A bucket has one dtype and one device, and holds at most `bucket_bytes`; a tensor that is larger
    has a bucket to itself. The result depends only on the arguments, so all ranks get the same.

    Args:
        first_bucket_bytes: the limit of the first bucket, if it is smaller.

    Returns:
        Indices into `tensors`, bucket by bucket, in the order in which buckets become complete.
    """
    first = bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    done: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        limit = bucket_bytes if done else first
        if kind in open_buckets and num_bytes[kind] + size > limit:
            done.append(open_buckets.pop(kind))
        num_bytes[kind] = size + (num_bytes[kind] if kind in open_buckets else 0)
        open_buckets.setdefault(kind, []).append(index)
    done.extend(open_buckets.values())
    return sorted(done, key=lambda bucket: bucket[-1])
