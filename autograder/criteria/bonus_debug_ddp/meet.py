"""Criteria for code where ranks meet: evaluation, doing something once, and metrics.

A mismatch that would hang real ranks fails at once on the emulated cluster, because the cluster
knows which ranks will never join.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autograder.criteria.bonus_debug_ddp.causes import because
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import finite_floats, read, read_number, told
from autograder.criteria.common.emulated import charge_plan
from autograder.criteria.common.places import ordering_sets_as
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.plan import ChargePlan
from minidist.emulate.trace import Event

SIZES = (3, 5, 2)

# --- evaluation ----------------------------------------------------------------------------------


def _draw_dataset(draw: Draw, settings: list[tuple[int, int]], *, alike: bool) -> list[Values]:
    """The same model and datasets on every rank: a dataset per (number of samples, batch size).

    The ranks' default generators have the same seed if `alike`, else different ones.
    """
    rng = draw.shared()
    values = oracle.draw_parameters(rng, SIZES) | {"settings": [list(s) for s in settings]}
    for number, (n, _) in enumerate(settings):
        batch = oracle.draw_batch(rng, n, SIZES)
        # Targets of different sizes: a sample that is missing or counted twice changes the loss.
        batch["y"] *= np.exp(rng.normal(size=(n, 1))).astype(np.float32)
        values |= {f"{name}/{number}": batch[name] for name in "xy"}
    return [values | {"seed": 0 if alike else rank} for rank in range(draw.world_size)]


def draw_tail(draw: Draw) -> list[Values]:
    """Two dataset sizes that the ranks cannot share evenly; one is below the number of ranks.

    A third one they can share, but not in whole batches.
    """
    rng, w = draw.shared("sizes"), draw.world_size
    size = int(rng.integers(4, 8))
    # One sample too many: shares that are rounded up differ by two or more.
    odd = int(rng.integers(3, 6)) * w + 1
    return _draw_dataset(draw, [(odd, 1), (max(1, w - 1), 1), (w * (size - 1), size)], alike=False)


def draw_batches(draw: Draw) -> list[Values]:
    """Equal shares on all ranks; the last batch of a share is smaller than the batch size."""
    rng, w = draw.shared("sizes"), draw.world_size
    size = int(rng.integers(4, 8))
    return _draw_dataset(draw, [(w * (2 * size + 1), size), (w * (size - 1), size)], alike=True)


class _Counted(nn.Module):
    """Counts the samples that go through a model, and the most that do so at once."""

    def __init__(self, inputs: Values) -> None:
        super().__init__()
        self.net = oracle.mlp(inputs)
        self.count = self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += len(x)
        self.most = max(self.most, len(x))
        return self.net(x)


def observe_evaluate(evaluate: Any, inputs: Values, context: Context) -> Values:
    """`_observe_evaluate`, with a default generator that is seeded as drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(inputs["seed"])
        return _observe_evaluate(evaluate, inputs, context)


def _observe_evaluate(evaluate: Any, inputs: Values, context: Context) -> Values:
    """The returned loss, and how many samples this rank has evaluated, in all and at once."""
    answer: Values = {}
    for number, (_, batch_size) in enumerate(inputs["settings"]):
        model = _Counted(inputs).to(context.device)
        dataset = TensorDataset(*(torch.from_numpy(inputs[f"{n}/{number}"]) for n in "xy"))
        loss = evaluate(model, dataset, oracle.mse, batch_size)
        answer[f"loss/{number}"] = np.array(read_number(loss, "evaluate"))
        answer[f"count/{number}"], answer[f"most/{number}"] = model.count, model.most
    return answer


def _expected_loss(case: Case, number: int) -> np.ndarray:
    """The mean loss over all samples of a dataset."""
    inputs = case.inputs[0]
    x, y = (torch.from_numpy(inputs[f"{name}/{number}"]).double() for name in "xy")
    return np.array(oracle.mse(oracle.mlp(inputs, torch.float64)(x), y).item())


def judge_evaluate(
    case: Case, ranks: int | None = None, batch_sizes: range | None = None
) -> list[Finding]:
    """The loss is the mean over all samples; all ranks together evaluate each sample once.

    Args:
        ranks: on how many ranks the loss is judged; None: on all.
        batch_sizes: the batch sizes with which the loss is judged; None: all.
    """
    inputs = case.inputs[0]
    findings: list[Finding] = []
    for number, (n, batch_size) in enumerate(inputs["settings"]):
        expected = _expected_loss(case, number)
        where = f"{n} samples on {case.world_size} ranks, batch_size={batch_size}"
        counts = [told(answer, f"count/{number}") for answer in case.answers]
        if not all(type(c) is int for c in counts) or sum(counts) != n:
            more = all(type(c) is int for c in counts) and sum(counts) > n
            why = (
                "Some samples count twice: a DistributedSampler, for one, fills all shares up to "
                "one length."
                if more
                else "Some samples are left out."
            )
            findings.append(
                Finding(
                    f"{where}: the ranks looked at {counts} samples, together they should have "
                    f"looked at {n}. {why} Shares may differ by one sample."
                )
            )
            break
        if batch_sizes is not None and batch_size not in batch_sizes:
            continue
        for rank, answer in enumerate(case.answers[:ranks]):
            hint = "Every sample has the same weight: sum over samples, then divide, once."
            if inputs["seed"] != case.inputs[-1]["seed"]:
                hint += " Or do shares overlap? Ranks' default generators differ."
            if rank and oracle.agrees(case.answers[0].get(f"loss/{number}"), expected):
                hint = "Rank 0 has the right loss: every rank needs the sums of all ranks."
            if n < case.world_size and finite_floats(answer.get(f"loss/{number}"), ()) is None:
                hint = "A rank without samples has no mean of its own: 0 / 0 is nan."
            if wrong := oracle.differs(
                rank, f"{where}: loss", answer.get(f"loss/{number}"), expected, hint=hint
            ):
                findings.append(wrong)
        if findings:
            break
    return findings


def _only_rank_0_is_right(case: Case) -> bool:
    """No other rank has rank 0's loss, on any dataset."""
    for number in range(len(case.inputs[0]["settings"])):
        first = finite_floats(case.answers[0].get(f"loss/{number}"), ())
        others = [answer.get(f"loss/{number}") for answer in case.answers[1:]]
        if first is None or any(oracle.agrees(other, first) for other in others):
            return False
    return True


def _has_one_factor(case: Case) -> bool:
    """All losses are the right ones times one common factor."""
    factors = []
    for number in range(len(case.inputs[0]["settings"])):
        expected = _expected_loss(case, number)
        losses = [finite_floats(answer.get(f"loss/{number}"), ()) for answer in case.answers]
        factors += [np.nan if loss is None else float(loss / expected) for loss in losses]
    return np.allclose(factors, factors[0], rtol=oracle.RTOL["float32"])


def judge_tail(case: Case) -> Iterator[Finding]:
    """As `judge_evaluate`; in addition, the ranks' numbers of samples differ by at most one.

    These wrong losses cost only `debug_evaluate_batches`: one that only rank 0 has, one that is
    wrong only where a batch has several samples, one that is wrong everywhere by the same factor.
    """
    single = range(1, 2)
    findings = judge_evaluate(case, batch_sizes=single)
    if findings and _only_rank_0_is_right(case):
        findings = judge_evaluate(case, ranks=1, batch_sizes=single)
    if findings and _has_one_factor(case):
        findings = judge_evaluate(case, ranks=0)
    yield from findings
    for number, (n, size) in enumerate(case.inputs[0]["settings"]) if not findings else ():
        counts = [told(answer, f"count/{number}") for answer in case.answers]
        if max(counts) - min(counts) > 1:
            yield Finding(
                f"{n} samples on {case.world_size} ranks, batch_size={size}: they looked at "
                f"{counts} samples, which is not as even as it can be. The numbers may differ "
                "by one: all wait for the rank that has most."
            )


def judge_batches(case: Case) -> Iterator[Finding]:
    """As `judge_evaluate`; in addition, no batch is larger than `batch_size`."""
    findings = judge_evaluate(case)
    yield from findings
    for number, (_, size) in enumerate(case.inputs[0]["settings"]) if not findings else ():
        for rank, answer in enumerate(case.answers):
            most = told(answer, f"most/{number}")
            if type(most) is not int or most > size:
                yield Finding(
                    f"{most} samples went through the model at once, batch_size={size}: "
                    "more may not fit into memory.",
                    rank,
                )


# --- once ----------------------------------------------------------------------------------------

BUILD, LOAD = 0, 1  # layers of the charge plan


def draw_once(draw: Draw) -> list[Values]:
    """The token that `load` returns on each rank."""
    return [{"token": int(draw.private(r).integers(1 << 30))} for r in range(draw.world_size)]


def plan(source: Draw) -> ChargePlan:
    """What building and loading cost."""
    return charge_plan(source, (1e-1, 1e-3), (0.0, 0.0))


def observe_once(prepare_once: Any, inputs: Values, context: Context) -> Values:
    """Building and loading are charged, so the broker sees when each rank does either."""

    def build() -> int:
        context.broker.charge(BUILD, "forward")
        return inputs["token"] + 1  # what is built is not what is loaded

    def load() -> int:
        context.broker.charge(LOAD, "forward")
        return inputs["token"]

    loaded = prepare_once(build, load)
    return {"loaded": loaded if isinstance(loaded, int) else repr(loaded)[:80]}


def judge_once(case: Case) -> list[Finding]:
    """Rank 0 alone builds, then all ranks synchronise, then each rank loads once."""
    findings: list[Finding] = []
    events = case.trace.events
    built = [_computed(own, BUILD) for own in events]
    loaded = [_computed(own, LOAD) for own in events]
    for rank in range(case.world_size):
        if len(built[rank]) != (rank == 0):
            findings.append(
                Finding(
                    f"build() was called {len(built[rank])} times, expected {int(rank == 0)}.", rank
                )
            )
        elif len(loaded[rank]) != 1:
            findings.append(
                Finding(f"load() was called {len(loaded[rank])} times, expected 1.", rank)
            )
        elif told(case.answers[rank], "loaded") != case.inputs[rank]["token"]:
            findings.append(Finding("what load() gave was not returned.", rank))
    if findings:
        return findings
    # Collectives that rank 0 issued after its build.
    after = [e for e in events[0][built[0][0] :] if e.kind == "issue"]
    for rank in range(case.world_size):
        waited = {e.key for e in events[rank][: loaded[rank][0]] if e.kind == "wait"}
        if rank and not any(e.key in waited and _holds_back(e, rank) for e in after):
            loose = [e.collective for e in after if e.key in waited]
            why = (
                f"In a {loose[0]} to rank 0 this rank only sends: it does not wait for rank 0."
                if loose
                else "All ranks have to meet between the two."
            )
            findings.append(
                Finding(
                    "load() began before it was certain that rank 0's build() had ended. " + why,
                    rank,
                )
            )
        if rank == 0 and loaded[0][0] < built[0][0]:
            findings.append(Finding("load() was called before build().", 0))
    return findings


def _holds_back(issued: Event, rank: int) -> bool:
    """Whether `rank` gets no result of this collective before rank 0 has issued it.

    A rank that only sends may go on.
    """
    return issued.collective not in ("reduce", "gather", "recv") or issued.root == rank


def _computed(events: list[Event], layer: int) -> list[int]:
    return [i for i, e in enumerate(events) if e.kind == "compute" and e.layer == layer]


# --- metrics -------------------------------------------------------------------------------------

NAMES = ("loss", "accuracy", "tokens", "grad_norm", "lr")


def draw_order(draw: Draw) -> list[Values]:
    """The same metrics on every rank; neighbouring ranks have them in different orders.

    A set of texts also has a different order on each rank.
    """
    inputs: list[Values] = []
    shift = int(draw.shared().integers(len(NAMES)))
    for rank in range(draw.world_size):
        start = (shift + rank) % len(NAMES)  # neighbouring ranks always differ
        names = NAMES[start:] + NAMES[:start]
        values = draw.private(rank).uniform(1, 100, len(names))
        metrics = {n: float(v) for n, v in zip(names, values, strict=True)}
        inputs.append({"metrics": metrics, "own sets": True})
    return inputs


def draw_missing(draw: Draw) -> list[Values]:
    """The same order on every rank, but rank 0 lacks different metrics than the other ranks.

    Of three ranks the last has none. A value of rank 0 is zero, which is not the same as missing.
    """
    inputs = []
    for rank in range(draw.world_size):
        left_out = "tokens" if rank == 0 else "accuracy"
        if rank == 1:
            left_out = "accuracy lr loss"
        values = draw.private(rank).uniform(1, 100, len(NAMES))
        pairs = zip(sorted(NAMES), values, strict=True)
        metrics = {n: float(v) for n, v in pairs if n not in left_out.split()}
        if rank == 0:
            metrics["grad_norm"] = 0.0
        lacks_all = rank == draw.world_size - 1 > 1
        inputs.append({"metrics": {} if lacks_all else metrics, "own sets": False})
    return inputs


def observe_metrics(reduce_metrics: Any, inputs: Values, context: Context) -> Values:
    """The names and values that two calls of `reduce_metrics` with one dictionary return."""
    metrics = dict(inputs["metrics"])
    answer: Values = {}
    with ordering_sets_as(context.rank if inputs["own sets"] else 0, reduce_metrics):
        for call in range(2):
            reduced = read(reduce_metrics(metrics), lambda d: {**d}, "reduce_metrics", "a dict")
            answer[f"names/{call}"] = sorted(map(str, reduced))
            for n, v in reduced.items():
                answer[f"value/{call}/{n}"] = np.array(read_number(v, f"reduce_metrics, {n!r}"))
    return answer


def judge_metrics(case: Case) -> Iterator[Finding]:
    """On every rank, each metric is the mean over the ranks that have this metric.

    A second call with the same dictionary gives the same.
    """
    for rank, answer in enumerate(case.answers):
        if wrong := _judge_call(case, rank, answer, 0) or _judge_call(case, rank, answer, 1):
            yield wrong


def _explain_metric(everyone: list[dict[str, float]], name: str, got: Any) -> str:
    """A hint: the known wrong mean that `got` is."""

    def is_mean(values: list[float], count: int) -> bool:
        return oracle.agrees(got, np.array(math.fsum(values) / count))

    values = [metrics[name] for metrics in everyone if name in metrics]
    if 0.0 in values and len(values) > 1 and is_mean(values, len(values) - 1):
        return "A rank that has measured 0.0 has it, too."
    if len(values) < len(everyone) and is_mean(values, len(everyone)):
        return "Here a rank that does not have it was counted as zero: leave it out."
    # One metric of each rank: with few ranks, all choices can be tried.
    for names in itertools.product(*everyone) if len(everyone) <= 4 else ():
        chosen = [metrics[n] for metrics, n in zip(everyone, names, strict=True)]
        if len(set(names)) > 1 and is_mean(chosen, len(chosen)):
            whose = ", ".join(f"{n!r} of rank {rank}" for rank, n in enumerate(names))
            return (
                f"That is the mean of {whose}. A collective knows places and no names: all ranks "
                "need one order of names, and neither a dictionary nor a set gives one."
            )
    return "Every rank that has it counts alike, and no other rank."


def _judge_call(case: Case, rank: int, answer: Values, call: int) -> Finding | None:
    everyone = [inputs["metrics"] for inputs in case.inputs]
    names = sorted(set().union(*everyone))
    again = ", when called again with the same dictionary" if call else ""
    if told(answer, f"names/{call}") != names:
        return Finding(
            f"expected the metrics {names}, got {answer.get(f'names/{call}')}{again}. A metric "
            "that some rank has is reported by all.",
            rank,
        )
    for name in names:
        values = [metrics[name] for metrics in everyone if name in metrics]
        what = f"{name} (known to {len(values)} of {case.world_size} ranks){again}"
        expected = np.array(math.fsum(values) / len(values))
        got = answer.get(f"value/{call}/{name}")
        if wrong := oracle.differs(rank, what, got, expected):
            hint = "The first call gave what is expected: has it changed the dictionary?"
            if not call:
                hint = _explain_metric(everyone, name, got)
            return because(wrong, hint)
    return None
