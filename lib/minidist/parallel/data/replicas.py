"""Making the replicas of data parallelism equal, and checking first that they can be.

Data parallelism holds one replica of the model per rank. The replicas stay equal because they start
equal and take equal steps. This file makes them equal at the start.

Phases: compare the shapes on all ranks, then broadcast parameters and buffers from one rank, many
tensors in one message.

Example::

    model = GPT(GPTConfig())      # a different random initialisation on every rank
    check_same_model(model)       # same names, shapes and dtypes, or MismatchError on every rank
    broadcast_state(model)        # now equal to rank 0's
"""

from __future__ import annotations

from itertools import chain

import torch.distributed as dist
from torch import nn

from minidist.collectives.replicas import broadcast_tensors, check_same_tensors


def check_same_model(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Collective: check that all ranks hold a model of the same form.

    Without this check, different models would raise no error: buckets of different sizes hang or,
    worse, add gradients of different parameters.

    Raises:
        MismatchError: on every rank: names, shapes, dtypes or `requires_grad` differ. The message
            gives the first difference from rank 0.
    """
    check_same_tensors(chain(module.named_parameters(), module.named_buffers()), group)


def broadcast_state(
    module: nn.Module, group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Collective: overwrite parameters and buffers with those of rank `source` of the group."""
    broadcast_tensors(chain(module.parameters(), module.buffers()), group, source)
