"""Collectives, built on send and receive.

An algorithm is data: a `Schedule`, a list of steps of (src, dst, chunk, "reduce" or "copy"). The
functions of `algorithms` make the schedules. One function runs every schedule, the lectures draw
schedules, and `Schedule.time_s` estimates how long a schedule takes.

| read in this order | |
|---|---|
| `schedule`, `algorithms` | the algorithms as data; no torch |
| `transport`, `reduction` | the loop that sends, receives and adds |
| `ring`, `tree`, `halving_doubling`, `direct` | all-reduce, reduce-scatter, all-gather |
| `rooted`, `alltoall`, `hierarchical` | broadcast, reduce, gather, scatter; all-to-all; nodes |
| `async_work`, `issue` | `async_op=True` and what it guarantees; validation |
| `ddp_hooks`, `torch_backend` | DDP communication hooks; the torch.distributed backend "minidist" |
| `ordered`, `barrier` | a sum in the order of the ranks; a barrier that names who is missing |
| `log` | which rank called what, how many bytes, which rank waited for which |

Example::

    ring_all_reduce(gradient, "avg")            # in place, on all ranks of the default group
    work = tree_all_reduce(gradient, async_op=True)
    work.wait()

Names that need torch are loaded when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
