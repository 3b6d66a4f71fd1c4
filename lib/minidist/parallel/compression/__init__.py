"""Gradient compression: fewer bytes per all-reduce, and how to handle the lost precision.

| compressor             | on the wire                                 | loses                     |
|------------------------|---------------------------------------------|---------------------------|
| `Cast(torch.float32)`  | 4 bytes per element                         | nothing: the baseline     |
| `Cast(torch.float16)`  | 2 bytes per element                         | range, 13 mantissa bits   |
| `Cast(torch.bfloat16)` | 2 bytes per element                         | 16 mantissa bits          |
| `Int8()`               | 1 byte per element, 4 per tensor or channel | all but 255 levels        |
| `TopK(density)`        | 8 bytes per element that is sent            | the small elements        |
| `PowerSGD(rank)`       | 4 rank (rows + columns) bytes per matrix    | small singular values     |

Three ways to use every compressor::

    ddp.register_comm_hook(HookState(TopK(0.01)), compression_hook)  # stock DDP
    ddp = BucketedDDP(model, reduce=lambda flat: sum_in_place(compressor, flat, ddp.buckets))
    mean = compressor.reduce(flat, segments_of(parameters), group)   # any flat gradient

Three guarantees that every compressor gives:

- **Every rank gets the same bits.** Replicas that differ in one bit drift apart, and nothing makes
  them equal again. So each element is summed on one rank and copied, or summed in rank order.
- **Nothing is lost with error feedback.** What a rank did not send stays in its residual, which is
  added to its next gradient. For the means over the ranks:
  gradient + residual before = result + residual after.
- **A gradient that is not finite gives a result that is not finite**, on every rank, and does not
  change the residual. So a loss scaler sees the overflow, and training can go on.

Papers: PowerSGD arXiv 1905.13727; top-k, Deep Gradient Compression arXiv 1712.01887; error feedback
arXiv 1901.09847.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
