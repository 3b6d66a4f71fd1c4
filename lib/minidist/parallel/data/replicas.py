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

from collections.abc import Container, Iterator
from itertools import chain
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from minidist.collectives.replicas import broadcast_tensors, check_same_tensors
from minidist.errors import named_rank
from minidist.precision.clip import refuse_pieces
from minidist.unsupported import Unsupported

NEW_PARAMETERS = Unsupported(
    "BucketedDDP, OverlappedDDP",
    "parameters that are added or unfrozen after wrapping",
    instead="add LoRA and the like before wrapping, or wrap the model again",
)
COPIES = Unsupported(
    "BucketedDDP, OverlappedDDP",
    "copies and pickles of the wrapper",
    instead="copy or save ddp.module, and wrap the copy",
)


def check_same_model(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Collective: check that all ranks hold a model of the same form.

    Without this check, different models would raise no error: buckets of different sizes hang or,
    worse, add gradients of different parameters.

    Raises:
        MismatchError: on every rank: names, shapes, dtypes or `requires_grad` differ. The message
            gives the first difference from rank 0.
    """
    refuse_pieces(module.parameters(), "data parallelism")
    check_same_tensors(chain(module.named_parameters(), module.named_buffers()), group)


def broadcast_state(
    module: nn.Module, group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Collective: overwrite parameters and buffers with those of rank `source` of the group."""
    broadcast_tensors(chain(module.parameters(), module.buffers()), group, source)


def quick_modules(module: nn.Module) -> Iterator[nn.Module]:
    """`module.modules()` for every forward: in any order, and in a fraction of the time."""
    seen: set[nn.Module] = set()
    modules: list[nn.Module | None] = [module]
    while modules:
        each = modules.pop()
        if each is not None and each not in seen:
            seen.add(each)
            yield each
            modules += each._modules.values()


def check_no_new_parameters(module: nn.Module, known: Container[Tensor], where: str) -> None:
    """Check that every parameter to train was one when the model was wrapped.

    Raises:
        ValueError: a parameter was unfrozen or added since, so that nobody would average its
            gradient.
    """
    if not any(
        p is not None and p.requires_grad and p not in known
        for each in quick_modules(module)
        for p in each._parameters.values()
    ):
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise NEW_PARAMETERS.error(
                f"{name} was frozen or not there when the model was wrapped, and now wants a "
                f"gradient on {named_rank()}, which nothing averages",
                where=where,
            )


def refuse_copy(wrapper: Any) -> NoReturn:
    """For `__reduce_ex__` of a wrapper: `copy`, `pickle` and `torch.save` end here.

    Raises:
        TypeError: always. The hooks of the parameters do not travel with a copy, so it would train
            without averaging.
    """
    raise COPIES.error(
        f"the wrapper was to be copied or pickled on {named_rank()}, and its hooks and its process "
        "group would stay behind",
        TypeError,
        where=type(wrapper).__name__,
    )
