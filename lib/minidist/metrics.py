"""Metrics over all ranks that equal the metrics of one process, and logging on rank 0.

The mean of the ranks' means is wrong if the ranks saw different numbers of samples or tokens. So
every metric here keeps a **sum** and a **count**, adds to both locally without communication, and
reduces both once, at the end. Ranks may have different numbers of batches, or none at all.

Example::

    loss, accuracy = WeightedMean(), Accuracy()
    for inputs, targets in loader:                   # tail="uneven": each sample once
        logits = model(inputs)
        loss.update(lm_loss(logits, targets), weight=targets.numel())
        accuracy.update(logits, targets)
    results = reduce_metrics({"loss": loss, "accuracy": accuracy})    # one all-reduce
    log0("loss %.3f", results["loss"])

>>> loss = WeightedMean()
>>> loss.update(1.0, weight=30)      # 30 tokens
>>> loss.update(2.0, weight=10)
>>> loss.compute()                   # without a process group: of this process
1.25
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.device import as_bytes, choose_device
from minidist.errors import MismatchError, named_rank

_ROOM = 64  # numbers in the first message of metrics; up to 31 metrics need no second message
_MAX_NUMBER = 2**16  # so that sums of squares over many ranks are exact in float64


class WeightedMean:
    """Sum of weight * value divided by the sum of weights, over all updates of all ranks.

    Values stay on their device, so an update does not wait for a GPU. Sums are float64.
    """

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.count: Tensor | float = 0.0

    def update(self, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a mean over `weight` samples or tokens. Weight 0 ignores the value, even nan.

        Of a tensor of values, each is added, with a weight of its own or all with the same weight.

        Raises:
            ValueError: the shape of the weights is not that of the values.
        """
        weight = _wide(weight)
        _check_shapes(value, weight)
        product = _wide(value) * weight
        if isinstance(product, Tensor):
            nothing = torch.as_tensor(weight == 0, device=product.device)
            weight = (torch.zeros_like(product) + weight).sum()
            product = torch.where(nothing, 0.0, product).sum()
        elif weight == 0:
            product = 0.0
        self.sum = self.sum + product
        self.count = self.count + weight

    def compute(self, group: dist.ProcessGroup | None = None) -> float:
        """Collective: the mean over the ranks of `group`; nan if the sum of all weights is 0."""
        return reduce_metrics({"mean": self}, group)["mean"]

    def finish(self, total: float, count: float) -> float:
        """The metric, from the sum and the count of all ranks."""
        return total / count if count else math.nan


class Accuracy(WeightedMean):
    """Share of targets that are among the k most likely classes, from 0 to 1."""

    def __init__(self, k: int = 1, ignore_index: int = -100) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"Accuracy: k must be at least 1, got {k}")
        self.k = k
        self.ignore_index = ignore_index

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """Logits (..., classes), integer targets (...); targets of `ignore_index` do not count."""
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"Accuracy: logits {tuple(logits.shape)} of {named_rank()} do not fit targets "
                f"{tuple(targets.shape)}: expected {tuple(logits.shape[:-1])}"
            )
        best = logits.topk(min(self.k, logits.shape[-1]), dim=-1).indices
        counts = targets != self.ignore_index
        hits = (best == targets.unsqueeze(-1)).any(-1) & counts
        self.sum = self.sum + hits.sum().double()
        self.count = self.count + counts.sum().double()


def reduce_metrics(
    metrics: Mapping[str, WeightedMean], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Collective: all metrics over all ranks, in one all-reduce (two, if there are more than 31).

    Every rank passes the same names. Without a process group, the metrics are those of this
    process.

    Raises:
        MismatchError: on every rank, if names differ.
    """
    names = sorted(metrics)
    # The first message has the same size for all names, and carries a hash of the names. Unchecked,
    # metrics of different names would be added up, or a rank would wait for ever.
    number = float(zlib.crc32("\n".join(names).encode()) % _MAX_NUMBER)
    parts = [number, number**2]
    parts += [part for name in names for part in (metrics[name].sum, metrics[name].count)]
    parts += [0.0] * (_ROOM - len(parts))
    device = _device(group)
    sums = torch.stack([torch.as_tensor(p, dtype=torch.float64, device=device) for p in parts])
    if _is_distributed():
        dist.all_reduce(sums[:_ROOM], group=group)
        total, squares = sums[:2].tolist()
        if total**2 != dist.get_world_size(group) * squares:  # not all numbers are equal
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, names, group)
            raise MismatchError(
                f"reduce_metrics: the ranks of the group passed different names: {every}",
                rank=dist.get_rank(),
            )
        if len(sums) > _ROOM:
            dist.all_reduce(sums[_ROOM:], group=group)
    values = sums.tolist()[2:]
    at = {name: i for i, name in enumerate(names)}
    return {
        name: metric.finish(values[2 * at[name]], values[2 * at[name] + 1])
        for name, metric in metrics.items()
    }


def gather_variable(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Collective: the tensors of all ranks. Their first dimensions may differ and may be 0.

    Pads all tensors to the longest, because an all-gather needs equal shapes, and removes the
    padding afterwards.

    Args:
        tensor: (n, ...); n may differ between ranks. The dtype and the remaining dimensions must be
            the same on all ranks.

    Returns:
        One tensor per rank of the group, on the device of `tensor`.

    Raises:
        ValueError: on a rank that passes a scalar.
        MismatchError: on every rank, if dtypes or the remaining dimensions differ; and on the ranks
            with a correct tensor, if a different rank passes a scalar.
    """
    wrong = ""
    if tensor.dim() == 0:
        wrong = f"expected a tensor with a first dimension, {named_rank(group)} gave a scalar"
    # Exchange shapes and dtypes first, so that an error is raised on every rank.
    info = (*tensor.shape[:1], tuple(tensor.shape[1:]), str(tensor.dtype))
    infos = _all_fit("gather_variable", wrong, group, info)
    if not _is_distributed():
        return [tensor.detach()]
    device = _device(group)
    world_size = dist.get_world_size(group)
    kinds = [info[1:] for info in infos]
    for other, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise MismatchError(
                f"gather_variable: rank 0 of the group has rows of {kinds[0]}, rank {other} of "
                f"{kind}",
                rank=dist.get_rank(),
            )
    # Gather padded tensors as bytes, which works for every dtype.
    longest = max(info[0] for info in infos)
    padded = torch.zeros((longest, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    padded[: len(tensor)] = tensor.detach()
    every = [torch.empty_like(padded) for _ in range(world_size)]
    if padded.numel():
        dist.all_gather([as_bytes(each) for each in every], as_bytes(padded), group=group)
    return [each[: info[0]].to(tensor.device) for each, info in zip(every, infos, strict=True)]


def gather_predictions(
    predictions: Tensor, indices: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Collective: predictions of all ranks in the order of the data set, without duplicates.

    Args:
        predictions: (n, ...), one row per sample that this rank saw.
        indices: (n,) int64, the indices of the samples in the data set. A sample that several ranks
            saw (a padded tail) is returned once.

    Returns:
        (number of different samples, ...), by ascending index.

    Raises:
        ValueError: on a rank that does not pass one index per prediction.
        MismatchError: on the remaining ranks in this case; and as `gather_variable`.
    """
    wrong = ""
    if predictions.dim() == 0 or indices.shape != predictions.shape[:1]:
        wrong = (
            f"expected one index per prediction, {named_rank(group)} gave predictions "
            f"{tuple(predictions.shape)} and indices {tuple(indices.shape)}"
        )
    _all_fit("gather_predictions", wrong, group)
    rows = torch.cat(gather_variable(predictions, group))
    numbers = torch.cat(gather_variable(indices.to(predictions.device), group))
    order = torch.argsort(numbers, stable=True)
    ordered = numbers[order]
    first = torch.ones(len(ordered), dtype=torch.bool, device=ordered.device)
    first[1:] = ordered[1:] != ordered[:-1]
    return rows[order[first]]


def _all_fit(
    where: str, wrong: str, group: dist.ProcessGroup | None, told: Any = None
) -> list[Any]:
    """Collective: raise on all ranks if any rank has an error, so that no rank waits for it.

    Args:
        wrong: the error of this rank; "" if there is none.
        told: what this rank sends to all ranks.

    Returns:
        `told` of every rank, if no rank has an error.
    """
    found: list[Any] = [(wrong, told)]
    if _is_distributed():
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (wrong, told), group)
    if wrong:
        raise ValueError(f"{where}: {wrong}")
    if others := [other for other, _ in found if other]:
        raise MismatchError(f"{where}: {'; '.join(others)}", rank=dist.get_rank())
    return [each for _, each in found]


def get_logger(name: str = "minidist", level: int = logging.INFO) -> logging.Logger:
    """A logger that adds the rank to each line: `12:00:01 [rank 1] loading`."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, _RankFilter) for h in logger.handlers for each in h.filters):
        handler = logging.StreamHandler()
        handler.addFilter(_RankFilter())
        handler.setFormatter(
            logging.Formatter("%(asctime)s [rank %(rank)s] %(message)s", datefmt="%H:%M:%S")
        )
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)
    return logger


def log0(message: str, *args: Any, logger: logging.Logger | None = None) -> None:
    """Log on rank 0 only. Call it on all ranks: they all run the collectives in its arguments."""
    if _rank() == 0:
        (logger or get_logger()).info(message, *args)


class _RankFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = _rank()
        return True


def _rank() -> int:
    """This process's rank. Before a process group exists, torchrun's RANK (0 without it)."""
    return dist.get_rank() if _is_distributed() else int(os.environ.get("RANK", "0"))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which this group's collectives need their tensors."""
    if _is_distributed() and dist.get_backend(group) == "nccl":
        return choose_device()
    return torch.device("cpu")


def _wide(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _check_shapes(value: Tensor | float, weight: Tensor | float) -> None:
    """One weight for all values, or as many as values."""
    values = value.shape if isinstance(value, Tensor) else torch.Size()
    weights = weight.shape if isinstance(weight, Tensor) else torch.Size()
    if weights not in ((), values):
        raise ValueError(
            f"update: expected one weight, or weights of the shape of the values "
            f"{tuple(values)}, got weights {tuple(weights)} on {named_rank()}"
        )
