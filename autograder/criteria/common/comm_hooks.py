"""Whether torch's DDP accepts a student's communication hook. For use in the ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common.answers import described


def refused(ddp: DistributedDataParallel, hook: Any) -> str:
    """Why DDP would refuse a hook; "" if it would not."""
    try:
        ddp._check_comm_hook(hook)
    except KeyError:
        names = list(inspect.signature(hook).parameters)
        return f"the hook's arguments are called {names}: DDP wants the second to be 'bucket'."
    except (AttributeError, TypeError, ValueError) as error:
        return f"DDP refuses the hook: {error}"
    return ""


def as_future(found: Any, hook: str) -> torch.futures.Future[torch.Tensor]:
    """What a hook has returned, if it is a Future.

    Raises:
        TypeError: it is something else, perhaps nothing.
    """
    if isinstance(found, torch._C.Future):  # what then() returns is no torch.futures.Future
        return found  # type: ignore[return-value]
    raise TypeError(f"{hook} returned {described(found)}; it has to return a torch Future")
