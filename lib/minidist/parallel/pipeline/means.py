"""The mean over a batch from the means of its micro-batches, each with its share of the targets.

The mean of the means would be wrong if the micro-batches have different numbers of targets that
count, such as sequences of different lengths, padded with -100.

>>> shares([torch.tensor([3, 1, 4]), torch.tensor([1, -100, -100])])
[0.75, 0.25]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist.errors import named_rank
from minidist.unsupported import Unsupported

MEANS = Unsupported(
    "PipelineExecutor, NativePipeline",
    "losses that divide by something else than the targets that are not -100 (ignore_index, "
    "weight, reduction) and do not say by what",
    instead="give count, such as `lambda targets: (targets != 0).sum()` or "
    "`lambda targets: weight[targets].sum()`",
)

Count = Callable[[Tensor], Tensor | float]


def count_targets(targets: Tensor) -> Tensor | float:
    """How many targets a mean counts: those that are not -100, torch's default `ignore_index`."""
    if targets.is_floating_point() or targets.is_complex():
        return targets.numel()
    return (targets != -100).sum()


def check_mean(where: str, loss_fn: Callable[..., Any], count: Count) -> None:
    """Raise ValueError if the loss's own options say that its mean does not count as `count` does.

    Options are those of a module such as nn.CrossEntropyLoss, or the keywords of a partial.
    """
    if count is not count_targets:
        return
    options = getattr(loss_fn, "keywords", None) or {
        name: getattr(loss_fn, name, None) for name in ("ignore_index", "weight", "reduction")
    }
    other = {
        "ignore_index": options.get("ignore_index") not in (None, -100),
        "weight": options.get("weight") is not None,
        "reduction": options.get("reduction") not in (None, "mean"),
    }
    if names := [f"{name}={options[name]!r}" for name, differs in other.items() if differs]:
        raise MEANS.error(f"the loss has {', '.join(names)} on {named_rank()}", where=where)


def shares(micro_targets: Sequence[Tensor], count: Count = count_targets) -> list[float]:
    """The share of each micro-batch in the targets that count; zeros if none counts."""
    counts = [torch.as_tensor(count(targets)) for targets in micro_targets]
    numbers = torch.stack(counts).double().tolist() if counts else []  # waits once for a GPU
    total = sum(numbers)
    if not all(number >= 0 for number in numbers) or total == float("inf"):
        raise ValueError(f"PipelineExecutor: count has to give numbers >= 0, got {numbers}")
    return [number / total if total else 0.0 for number in numbers]


def zero_loss(output: Tensor) -> Tensor:
    """A loss of zero whose gradient is zero, for a micro-batch that counts nothing.

    Its own loss is nan, a mean over nothing, and 0 * nan is nan.
    """
    return torch.where(torch.zeros_like(output, dtype=torch.bool), output, 0).sum()
