"""Metrics over ranks equal those of one process; rank-0 logging."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.errors import MismatchError
from minidist.launch import run
from minidist.metrics import (
    Accuracy,
    WeightedMean,
    gather_predictions,
    gather_variable,
    get_logger,
    log0,
    reduce_metrics,
)
from minidist.sampler import DistributedSampler

NUM, CLASSES = 13, 7


def data():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM, 5, CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (NUM, 5), generator=generator)
    targets[torch.rand(NUM, 5, generator=generator) < 0.3] = -100
    targets[3] = -100  # a batch without any token
    return logits, targets


def evaluate(logits, targets, batches):
    loss = WeightedMean()
    top1, top3 = Accuracy(), Accuracy(k=3)
    for rows in batches:
        tokens = (targets[rows] != -100).sum()
        mean = F.cross_entropy(logits[rows].flatten(0, 1), targets[rows].flatten())
        loss.update(mean, tokens)  # nan where there are no tokens
        top1.update(logits[rows], targets[rows])
        top3.update(logits[rows], targets[rows])
    return {"loss": loss, "top1": top1, "top3": top3}


CASES = ("uneven", "empty")


def measure(case):
    rank, n = dist.get_rank(), dist.get_world_size()
    logits, targets = data()
    if case == "uneven":
        indices = list(
            DistributedSampler(NUM, rank=rank, world_size=n, shuffle=False, tail="uneven")
        )
    else:  # some ranks have nothing
        indices = list(range(NUM)) if rank == n - 1 else []
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: calls.append(1) or all_reduce(*a, **k)
    metrics = evaluate(logits, targets, [indices[i : i + 2] for i in range(0, len(indices), 2)])
    results = reduce_metrics(metrics)
    num_calls = len(calls)
    alone = metrics["loss"].compute()
    empty = WeightedMean().compute()

    rows = torch.tensor(indices, dtype=torch.int64)
    predictions = gather_predictions(logits[rows], rows)
    kinds = {
        str(dtype): gather_variable(torch.full((rank, 2), rank).to(dtype))
        for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.complex64)
    }
    nothing = gather_variable(torch.zeros(0, 3))
    text = ""
    try:
        gather_variable(torch.zeros(2, 3 if rank == n - 1 else 4))
    except MismatchError as error:
        text = str(error)
    # What one rank gives wrong is an error on all of them, and names it.
    is_wrong = rank == n - 1
    for call in (
        lambda: gather_variable(torch.ones(()) if is_wrong else torch.ones(2)),
        lambda: gather_predictions(torch.zeros(2 + is_wrong, 3), torch.arange(2)),
    ):
        with pytest.raises(ValueError if is_wrong else MismatchError, match=f"rank {n - 1} of {n}"):
            call()
    dist.barrier()
    return results, num_calls, alone, empty, predictions, kinds, nothing, text


def measure_all():
    dist.init_process_group("gloo")
    all_reduce = dist.all_reduce
    results = []
    for case in CASES:
        results.append(measure(case))
        dist.all_reduce = all_reduce
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_metrics_equal_those_of_one_process(world_size):
    logits, targets = data()
    mask = targets != -100
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    best = logits.argsort(-1, descending=True)
    expected = {
        "loss": loss,
        "top1": (best[..., 0] == targets)[mask].double().mean().item(),
        "top3": (best[..., :3] == targets[..., None]).any(-1)[mask].double().mean().item(),
    }
    ranks = [
        (r, each) for r, all_cases in enumerate(run(measure_all, world_size)) for each in all_cases
    ]
    for rank, each in ranks:
        results, num_calls, alone, empty, predictions, kinds, nothing, text = each
        assert results == pytest.approx(expected, rel=1e-12)
        assert num_calls == 1
        assert alone == pytest.approx(loss, rel=1e-12)
        assert math.isnan(empty)
        torch.testing.assert_close(predictions, logits, rtol=0, atol=0)
        for gathered in kinds.values():
            assert [tuple(t.shape) for t in gathered] == [(r, 2) for r in range(world_size)]
            for r, t in enumerate(gathered):
                torch.testing.assert_close(t, torch.full((r, 2), r).to(t.dtype))
        assert [t.shape for t in nothing] == [(0, 3)] * world_size
        where = f"[rank {rank}] gather_variable: rank 0 of the group has rows of"
        assert text.startswith(where) or world_size == 1


def test_a_mean_of_means_would_be_wrong():
    """The oracle tells the two apart: without weights the result differs."""
    metric = WeightedMean()
    metric.update(1.0, 3)
    metric.update(2.0, 1)
    assert metric.compute() == 1.25


def test_a_padded_tail_is_counted_once_in_gathered_predictions():
    indices = torch.tensor([4, 0, 2, 0])
    got = gather_predictions(torch.tensor([40, 0, 20, 0]), indices)
    assert got.tolist() == [0, 20, 40]
    assert gather_predictions(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)).shape == (0, 2)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        Accuracy(k=0)
    with pytest.raises(ValueError, match=r"logits \(2, 3\) of this process do not fit .*\(3,\)"):
        Accuracy().update(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="this process gave a scalar"):
        gather_variable(torch.tensor(1))
    with pytest.raises(ValueError, match=r"gave predictions \(2,\) and indices \(3,\)"):
        gather_predictions(torch.zeros(2), torch.arange(3))
    assert reduce_metrics({}) == {}


def log_something():
    import contextlib
    import io

    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        get_logger("test").info("before")
        dist.init_process_group("gloo")
        get_logger("test").info("value %d", 3)  # the same handler, not a second one
        log0("only %s", "once", logger=get_logger("test"))
    dist.barrier()
    dist.destroy_process_group()
    return stderr.getvalue()


def test_logging():
    for rank, text in enumerate(run(log_something, 2)):
        lines = [line.split(" ", 1)[1] for line in text.splitlines()]
        expected = [f"[rank {rank}] before", f"[rank {rank}] value 3"]
        assert lines == expected + ["[rank 0] only once"] * (rank == 0)


def other_names():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss, accuracy = WeightedMean(), WeightedMean()
    loss.update(1.0)
    accuracy.update(5.0)
    metrics = {"loss": loss, "accuracy": accuracy}
    backwards = dict(reversed(metrics.items()))
    assert reduce_metrics(backwards if rank else metrics) == {"loss": 1.0, "accuracy": 5.0}
    for wrong in ({"loss": loss}, {"loss": loss, "other": accuracy}, {}):
        with pytest.raises(MismatchError, match=r"different names: .*'accuracy', 'loss'"):
            reduce_metrics(wrong if rank else metrics)
    many = {f"{i}": loss for i in range(40)}  # more than one message's room
    assert set(reduce_metrics(many).values()) == {1.0}


def test_metrics_are_told_apart_by_their_names():
    run(other_names, 3)


def test_a_tensor_of_values_adds_each_of_them():
    for update in (
        lambda mean: mean.update(torch.tensor([1.0, 2.0, 6.0])),
        lambda mean: mean.update(torch.tensor([[1.0, 2.0, 6.0]]), weight=4),
        lambda mean: mean.update(torch.tensor([1.0, 7.0, math.nan]), torch.tensor([2, 1, 0])),
    ):
        mean = WeightedMean()
        update(mean)
        assert mean.compute() == 3
    with pytest.raises(ValueError, match=r"the shape of the values \(3,\), got .*\(2,\)"):
        WeightedMean().update(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"values \(\), got weights \(2,\)"):
        WeightedMean().update(1.0, torch.ones(2))


def numbers_of_names():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for num in (31, 95):  # the numbers of values at which a message is full
        metrics = {f"m{i}": WeightedMean() for i in range(num + 1)}
        for i in range(num + 1):
            metrics[f"m{i}"].update(i + rank)
        with pytest.raises(MismatchError, match="different names"):
            reduce_metrics(metrics if rank else {k: metrics[k] for k in list(metrics)[:num]})
        assert reduce_metrics(metrics) == {f"m{i}": i + 0.5 for i in range(num + 1)}
    dist.barrier()


def test_other_numbers_of_metrics_are_told_on_every_rank():
    run(numbers_of_names, 2)
