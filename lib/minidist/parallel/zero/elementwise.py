"""Which optimisers may work on parts of parameters: tried out on small tensors, not looked up.

Stage 1 gives a rank some whole parameters, so an optimiser must treat each parameter by itself.
Stages 2 and 3 cut parameters, so it must treat each element by itself: SGD and Adam do; Adafactor,
Muon, LAMB and LARS look at rows or norms.

Phases: take three steps on whole tensors; take them on parts of the same tensors, each with an
optimiser of its own, as ranks have; compare. Small and large matrices, vectors and the weights of a
convolution are tried, because some optimisers treat only some shapes as wholes.

An optimiser that cannot be tried in this way (it needs arguments that are not in its `defaults`,
say) declares what it does in a class attribute: `elementwise = True`, or False.

>>> from functools import partial
>>> why_not_elementwise(partial(torch.optim.AdamW, lr=0.1))
>>> why_not_elementwise(torch.optim.Adafactor)
'its step for a whole matrix differs from its step for parts of it'
>>> why_not_per_parameter(torch.optim.Adafactor)
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.precision.clip import shard_group
from minidist.unsupported import Unsupported

WHOLE = Unsupported(
    "Zero2Optimizer, Zero3",
    "optimisers that look at whole parameters (Muon, LAMB, LARS, Adafactor)",
    instead="give Zero3's pieces to WholeOptimizer, and use ShardedOptimizer in place of "
    "Zero2Optimizer: in both, one rank has each parameter whole",
)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def why_not_elementwise(make: Make, device: torch.device | str = "cpu") -> str | None:
    """Why the optimiser that `make` makes may not update parts of a parameter; None if it may."""
    declared = getattr(getattr(make, "func", make), "elementwise", None)
    if declared is not None:
        return None if declared else "it declares elementwise = False"
    for shape, name in _SHAPES.items():
        start, gradients = _examples(device, shape)
        try:
            whole = _steps(make, start[:1], [each[:1] for each in gradients])
        except Exception as error:
            if shape != _MATRIX:  # it takes matrices only
                continue
            return _untried(error)
        cut = [7, start[0].numel() - 7]
        parts = [each.flatten().split(cut) for each in (start[0], *(g[0] for g in gradients))]
        try:
            pieces = [
                _steps(make, parts[0][i : i + 1], [part[i : i + 1] for part in parts[1:]])[0]
                for i in range(2)
            ]
        except Exception as error:
            return f"it does not take a part of {name}: {error}"
        if _differ(torch.cat(pieces), whole[0].flatten()):
            return f"its step for a whole {name} differs from its step for parts of it"
    return None


def why_not_per_parameter(make: Make, device: torch.device | str = "cpu") -> str | None:
    """Why the parameters of the optimiser may not be spread over ranks; None if they may."""
    if getattr(getattr(make, "func", make), "elementwise", None):
        return None
    start, gradients = _examples(device, _MATRIX)
    try:
        together = _steps(make, start, gradients)
        alone = [
            _steps(make, start[i : i + 1], [each[i : i + 1] for each in gradients])[0]
            for i in range(len(start))
        ]
    except Exception as error:
        return _untried(error)
    if any(map(_differ, alone, together)):
        return "its step for one parameter depends on the others"
    return None


def check_step_of_pieces(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Before a step of any optimiser: may it update the pieces of a Zero3 model?

    Raises:
        ValueError: it looks at whole parameters, or has state from before they were cut.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if _checked.get(optimizer) == len(params) or shard_group(params) is None:
        return
    kind = type(optimizer)
    for p in params:
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.numel() != p.numel():
                raise ValueError(
                    f"Zero3: {kind.__name__} has a {key} of shape {tuple(value.shape)} for a piece "
                    f"of {p.numel()} elements on {named_rank()}: it took steps before the model "
                    "was sharded; make it after Zero3(model), and load its state with "
                    "load_optimizer_state_dict"
                )
    accepted = inspect.signature(kind.__init__).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}

    def make(some: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(some, **options)

    make.elementwise = getattr(kind, "elementwise", None)  # pyright: ignore
    reason = why_not_elementwise(make, params[0].device)
    if reason is not None:
        raise refuse_whole("Zero3", kind.__name__, reason)
    _checked[optimizer] = len(params)


def refuse_whole(where: str, name: str, reason: str) -> ValueError:
    """The error of an optimiser that looks at whole parameters where they are cut."""
    return WHOLE.error(
        f"{name} looks at whole parameters, which are cut by element here ({reason}) on "
        f"{named_rank()}",
        where=where,
    )


_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


_MATRIX = (4, 6)
_SHAPES = {
    _MATRIX: "matrix",
    (260, 258): "large matrix",
    (24,): "vector",
    (4, 3, 3, 3): "convolution's weight",
}


def _examples(
    device: torch.device | str, shape: tuple[int, ...]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two tensors, and their gradients in three steps."""
    generator = torch.Generator().manual_seed(0)
    made = [[torch.randn(shape, generator=generator).to(device) for _ in "ab"] for _ in range(4)]
    return made[0], made[1:]


@torch.no_grad()
def _steps(
    make: Make, start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    params = [nn.Parameter(value.clone()) for value in start]
    optimizer = make(params)
    for group in optimizer.param_groups:
        if "lr" in group:  # a rate of 0, as at the start of a schedule, would hide everything
            group["lr"] = 0.1
    for each in gradients:
        for param, gradient in zip(params, each, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    return [param.detach() for param in params]


def _differ(a: Tensor, b: Tensor) -> bool:
    return not torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def _untried(error: Exception) -> str:
    return (
        f"it could not be tried ({type(error).__name__}: {error}); if it updates each element by "
        "itself, say so: elementwise = True in its class"
    )
