"""Weights that several stages of a pipeline hold: every holder gets the sum of all gradients.

A model may use one weight in two places: the embedding and the output layer of a GPT, or one layer
called twice. If a cut lies between them, each side holds a copy and computes a part of the
gradient. With equal sums and equal optimizer state the copies stay equal (Megatron-LM does the same
for embeddings).

Phases: `tie_weights` notes in each stage which of its weights other stages hold, too (`split_model`
calls it); `find_ties` asks the ranks once which weights they hold; `summed` adds the gradients up.

>>> shared = nn.Linear(2, 2)
>>> model = nn.Sequential(shared, nn.Tanh(), shared)
>>> tie_weights(model, model[2:]).tied_weights
{'2.weight': '0.weight', '2.bias': '0.bias'}
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Stage = TypeVar("Stage", bound=nn.Module)


@dataclass(frozen=True)
class Tie:
    """A weight that is held more than once.

    Args:
        copies: this rank's copies of the weight, all of them different parameters.
        ranks: the ranks of the pipeline that hold a copy, in order.
    """

    copies: list[Tensor]
    ranks: list[int]


def tie_weights(model: nn.Module, stage: Stage) -> Stage:
    """Note which weights of `stage` are also in the model's other stages; returns the stage.

    `stage.tied_weights` is name -> first name of the weight in the model. A stage that does not
    hold the weight under its first name gets a copy of its own.

    Args:
        model: the whole model.
        stage: some of its modules, under their names in the model.

    Raises:
        ValueError: a norm with running statistics is on both sides of a cut.
    """
    modules = dict(stage.named_modules(remove_duplicate=False))
    for names in _names_of(model.named_modules(remove_duplicate=False)):
        norm = modules.get(next((name for name in names if name in modules), ""))
        outside = [name for name in names if name not in modules]
        if outside and isinstance(norm, _NormBase) and norm.track_running_stats:
            raise ValueError(
                f"split_model: {names[0]!r} and {names[1]!r} are one {type(norm).__name__} on both "
                "sides of a cut, and its running statistics would differ; use two modules"
            )
    own = dict(stage.named_parameters(remove_duplicate=False))
    tied: dict[str, str] = {}
    borrowed: set[int] = set()
    for names in _names_of(model.named_parameters(remove_duplicate=False)):
        inside = [name for name in names if name in own]
        if inside and len(inside) < len(names):
            tied[inside[0]] = names[0]
            if names[0] not in own:
                borrowed.add(id(own[inside[0]]))
    # A copy of the borrowed weights; everything else in the copied modules stays shared.
    memo = {id(x): x for x in [*own.values(), *stage.buffers()] if id(x) not in borrowed}
    for name, child in list(stage._modules.items()):
        if child is not None and any(id(p) in borrowed for p in child.parameters()):
            stage._modules[name] = copy.deepcopy(child, memo)
    stage.tied_weights = tied  # type: ignore[assignment]
    return stage


def has_ties(stage: nn.Module) -> bool:
    """Whether other stages hold weights of this stage."""
    return any(True for _ in _tied(stage))


def find_ties(stages: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> list[Tie]:
    """The tied weights of this rank's stages, in the same order on all ranks. Collective."""
    mine: dict[str, dict[int, Tensor]] = {}
    for stage in stages:
        for key, weight in _tied(stage):
            mine.setdefault(key, {})[id(weight)] = weight
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, sorted(mine), group=group)
    return [
        Tie(list(mine[key].values()), [rank for rank, keys in enumerate(every) if key in keys])
        for key in sorted(mine)
    ]


@contextlib.contextmanager
def summed(ties: Sequence[Tie], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Give all copies of a tied weight the sum of the gradients that the block computes.

    Collective for the ranks that hold copies. Gradients from before the block stay, and the sum is
    added to them.
    """
    before = [[weight.grad for weight in tie.copies] for tie in ties]
    for tie in ties:
        for weight in tie.copies:
            weight.grad = None
    yield
    for tie, grads in zip(ties, before, strict=True):
        if not tie.copies[0].requires_grad:
            continue
        total = _sum_over_ranks(tie, group)
        for weight, grad in zip(tie.copies, grads, strict=True):
            weight.grad = total.clone() if grad is None else grad.add_(total)


def _sum_over_ranks(tie: Tie, group: dist.ProcessGroup | None) -> Tensor:
    grads = [weight.grad for weight in tie.copies if weight.grad is not None]
    own = torch.stack(grads).sum(0) if grads else torch.zeros_like(tie.copies[0])
    # Every holder sends its part to all others, because this needs no group of the holders.
    wire = "cpu" if dist.get_backend(group) == "gloo" else own.device
    rank = dist.get_rank(group)
    parts = {rank: own.detach().to(wire).contiguous()}
    operations = []
    for other in tie.ranks:
        if other != rank:
            parts[other] = torch.empty_like(parts[rank])
            operations += [
                dist.P2POp(dist.isend, parts[rank], group=group, group_peer=other),
                dist.P2POp(dist.irecv, parts[other], group=group, group_peer=other),
            ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    # The order of the ranks, so that all get the same bits.
    total = parts[tie.ranks[0]]
    for other in tie.ranks[1:]:
        total = total + parts[other]
    return total.to(own.device)


def _tied(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(key, weight); also of stages that a user has wrapped into a different module."""
    for module in stage.modules():
        tied: Any = getattr(module, "tied_weights", {})
        for name, key in tied.items():
            yield key, module.get_parameter(name)


def _names_of(named: Any) -> list[list[str]]:
    """The names of everything that has several names, one list for each."""
    names: dict[int, list[str]] = {}
    for name, thing in named:
        names.setdefault(id(thing), []).append(name)
    return [each for each in names.values() if len(each) > 1]
