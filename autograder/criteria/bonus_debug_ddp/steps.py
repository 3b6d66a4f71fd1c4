"""Criteria for single steps: what is averaged, what is waited for, and in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, item_of, told
from autograder.criteria.common.training import wrap
from autograder.criteria.common.weights import are_close, batch_gradients, collect, weights_of
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs
from autograder.criteria.lab2_accumulation import ddp

SIZES = (6, 9, 3)
SAMPLES = 4


def _draw_batches(draw: Draw, steps: int, dtype: str) -> list[Values]:
    """The same weights on all ranks; different data on each rank and in each step."""
    start = oracle.draw_parameters(draw.shared(), SIZES) | {"steps": steps, "dtype": dtype}
    return oracle.private_batches(draw, start, [(SAMPLES,)] * steps, SIZES)


def _global_batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks."""
    x, y = (np.concatenate([i[f"{n}/{step}"] for i in case.inputs]) for n in "xy")
    return torch.from_numpy(x).double(), torch.from_numpy(y).double()


def _told_parameters(answer: Values, model: nn.Module) -> None:
    for i, p in enumerate(model.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy().copy()


# --- one step by hand ----------------------------------------------------------------------------

LR = {"adam": 0.05, "sgd": 0.2}
ADAM_TOLERANCE = 0.02  # relative to the learning rate; a gradient's scale hardly changes the step


def draw_adam(draw: Draw) -> list[Values]:
    """Steps with Adam: the mean of the ranks' steps is not the step with the mean gradient."""
    return [i | {"optimizer": "adam"} for i in _draw_batches(draw, 3, "float64")]


def draw_sgd(draw: Draw) -> list[Values]:
    """Steps with SGD: a wrong scale of the gradient changes the weights."""
    return [i | {"optimizer": "sgd"} for i in _draw_batches(draw, 2, "float64")]


def _optimizer(inputs: Values, model: nn.Module) -> torch.optim.Optimizer:
    make = torch.optim.Adam if inputs["optimizer"] == "adam" else torch.optim.SGD
    return make(model.parameters(), lr=LR[inputs["optimizer"]])


def observe_step(train_step: Any, inputs: Values, context: Context) -> Values:
    """The weights after a few calls of `train_step`."""
    model = oracle.mlp(inputs, torch.float64).to(context.device)
    optimizer = _optimizer(inputs, model)
    for step in range(inputs["steps"]):
        x, y = (torch.from_numpy(inputs[f"{n}/{step}"]).double() for n in "xy")
        if inputs["optimizer"] == "adam":  # gradients that stay cost only `debug_step_mean`
            optimizer.zero_grad()
        train_step(model, optimizer, oracle.mse, x.to(context.device), y.to(context.device))
    answer: Values = {}
    _told_parameters(answer, model)
    return answer


def _one_process(case: Case) -> list[np.ndarray]:
    model = oracle.mlp(case.inputs[0], torch.float64)
    optimizer = _optimizer(case.inputs[0], model)
    for step in range(case.inputs[0]["steps"]):
        optimizer.zero_grad()
        x, y = _global_batch(case, step)
        oracle.mse(model(x), y).backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def judge_adam(case: Case) -> Iterator[Finding]:
    """The weights are those of one process that trains with Adam on the batch of all ranks."""
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(_one_process(case)):
            if wrong := differs(
                rank,
                f"Adam: parameter {i} after {case.inputs[0]['steps']} steps",
                answer.get(f"p{i}"),
                expected,
                rtol=0.0,
                atol=ADAM_TOLERANCE * LR["adam"],
                hint="Adam's step is no linear function of the gradient: average first, step then.",
            ):
                yield wrong
                break


def judge_sgd(case: Case) -> Iterator[Finding]:
    """The weights are those of one process that trains with SGD on the batch of all ranks."""
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(_one_process(case)):
            if wrong := oracle.differs(
                rank,
                f"SGD on {case.world_size} ranks: parameter {i} after 2 steps",
                answer.get(f"p{i}"),
                expected,
                dtype="float64",
                hint="A mean over ranks divides by the number of ranks, whatever that is.",
            ):
                yield wrong
                break


# --- buckets -------------------------------------------------------------------------------------

VALUES_PER_PARAMETER = 12


def _draw_buckets(draw: Draw, num_parameters: int, per_bucket: float) -> list[Values]:
    values = {
        "count": num_parameters,
        "bucket_bytes": int(per_bucket * VALUES_PER_PARAMETER * 4),
    }
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        inputs.append(
            values
            | {
                f"g{i}": rng.normal(size=(3, VALUES_PER_PARAMETER // 3)).astype(np.float32)
                for i in range(num_parameters)
            }
        )
    return inputs


def draw_tail(draw: Draw) -> list[Values]:
    """All gradients fit into one bucket and do not fill it."""
    return _draw_buckets(draw, int(draw.shared().integers(3, 7)), 10.0)


def draw_wait(draw: Draw) -> list[Values]:
    """Several buckets; the gradients fill each bucket exactly, also the last one."""
    rng = draw.shared()
    per_bucket = int(rng.integers(2, 4))  # not one: a gradient alone is no bucket
    return _draw_buckets(draw, per_bucket * int(rng.integers(3, 6)), float(per_bucket))


def observe_buckets(reduce_in_buckets: Any, inputs: Values, context: Context) -> Values:
    """The gradients after one reduction, and the order in which it sent and waited."""
    gradients = [torch.from_numpy(inputs[f"g{i}"].copy()) for i in range(inputs["count"])]
    params = [nn.Parameter(torch.zeros_like(g, device=context.device)) for g in gradients]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient.to(context.device)
    with _noted_calls() as calls:
        reduce_in_buckets(params, inputs["bucket_bytes"])
    answer: Values = {"calls": calls}
    return answer | {f"g{i}": oracle.grad_of(p).copy() for i, p in enumerate(params)}


@contextlib.contextmanager
def _noted_calls() -> Iterator[list[str]]:
    """Yields a list that gets "send" for every all-reduce and "wait" for every wait on a handle.

    The trace of the emulated cluster does not tell: there, whoever takes a future waits at once.
    """
    calls: list[str] = []
    all_reduce = dist.all_reduce

    def noted(*args: Any, **options: Any) -> Any:
        calls.append("send")
        work = all_reduce(*args, **options)
        if work is None:  # not asynchronous
            calls.append("wait")
            return None
        wait = work.wait

        def noted_wait(*args: Any, **options: Any) -> Any:
            calls.append("wait")
            return wait(*args, **options)

        work.wait = noted_wait
        return work

    with mock.patch.object(dist, "all_reduce", noted):
        yield calls


def _judge_buckets(case: Case, hint: str, *, any_scale: bool) -> Iterator[Finding]:
    for rank, answer in enumerate(case.answers):
        for i in range(case.inputs[0]["count"]):
            own = case.inputs[rank][f"g{i}"]
            expected = oracle.mean([inputs[f"g{i}"] for inputs in case.inputs])
            got = answer.get(f"g{i}")
            if any_scale and is_floats(got, expected.shape):
                scale = float((got * expected).sum() / (expected**2).sum())
                if scale > 0.1 and oracle.agrees(got, scale * expected):
                    continue
            why = oracle.explain_gradient(got, expected, own, case.world_size)
            what = f"gradient {i} of {case.inputs[0]['count']}"
            if wrong := oracle.differs(rank, what, got, expected, hint=f"{why} {hint}"):
                yield wrong
                break


def judge_tail(case: Case) -> Iterator[Finding]:
    """The gradients in the last bucket are reduced although the bucket is not full.

    A sum in place of the mean costs only `debug_bucket_wait`.
    """
    return _judge_buckets(
        case, "Here all gradients together do not fill one bucket.", any_scale=True
    )


def judge_wait(case: Case) -> Iterable[Finding]:
    """The student's code waits for every bucket before it uses the bucket, and not earlier."""
    return list(
        _judge_buckets(
            case,
            "Here there are several buckets: a tensor may be read only after the wait() of its "
            "own handle.",
            any_scale=False,
        )
    ) or list(_judge_traffic(case))


def _judge_traffic(case: Case) -> Iterator[Finding]:
    """Each bucket travels in one all-reduce; the first wait comes after the second of them."""
    numbers = case.inputs[0]["bucket_bytes"] // 4
    expected = [numbers] * (case.inputs[0]["count"] * VALUES_PER_PARAMETER // numbers)
    for rank, events in enumerate(case.trace.events):
        got = [e.numel for e in events if e.kind == "issue" and e.collective == "all_reduce"]
        if got != expected:
            yield Finding(
                f"{case.inputs[0]['count']} gradients of {4 * VALUES_PER_PARAMETER} bytes with "
                f"bucket_bytes={4 * numbers}: expected {len(expected)} all-reduces of {numbers} "
                f"numbers each, got {got}. A bucket is full when it holds bucket_bytes or more.",
                rank,
            )
        elif [item_of(told(case.answers[rank], "calls"), i) for i in (0, 1)] == ["send", "wait"]:
            yield Finding(
                "the first bucket has been waited for before the second was sent, so only one "
                "travels at a time. Send first, with async_op=True, and wait when all are under "
                "way.",
                rank,
            )


# --- accumulation --------------------------------------------------------------------------------


def draw_accumulate(draw: Draw) -> list[Values]:
    """Numbers of micro-batches unequal to the number of ranks; different data on each rank."""
    rng, sizes = draw.shared(), ddp.SIZES
    ks = [int(k) for k in rng.permutation([k for k in (2, 3, 4, 5) if k != draw.world_size])[:3]]
    start = oracle.draw_parameters(rng, sizes) | {"ks": ks}
    return oracle.private_batches(draw, start, [(k, SAMPLES) for k in ks], sizes)


def judge_accumulate(case: Case) -> list[Finding]:
    """Each of the W k micro-batches has weight 1/(W k); a second division by W has its own text."""
    findings = list(ddp.judge_gradients(case))
    if findings and case.world_size > 1 and _is_divided_twice(case):
        return [
            Finding(
                f"every p.grad is {1 / case.world_size:.3g} of what it should be: it was divided "
                "by the number of ranks twice. DDP does it, too."
            )
        ]
    return findings


def _is_divided_twice(case: Case) -> bool:
    for call, k in enumerate(case.inputs[0]["ks"]):
        pairs = [
            (x, y) for i in case.inputs for x, y in zip(i[f"x/{call}"], i[f"y/{call}"], strict=True)
        ]
        basis = batch_gradients(case.inputs[0], pairs)
        for answer in case.answers:
            weights = weights_of(basis, collect(answer, f"g{call}", len(basis[0])))
            if weights is None or not are_close(
                weights, np.full(len(pairs), 1 / (k * case.world_size**2))
            ):
                return False
    return True


# --- a step with a scaler ------------------------------------------------------------------------

AMP_LR, INIT_SCALE, NO_LIMIT = 0.1, 1024.0, 1e30


def _draw_scaled(draw: Draw, steps: int, **options: Any) -> list[Values]:
    return [i | options for i in _draw_batches(draw, steps, "float32")]


def draw_scaler(draw: Draw) -> list[Values]:
    """The scale grows after two good steps in a row; two steps overflow, each on one rank.

    An infinite input makes gradients nan; an infinite target makes them infinite and none nan.
    """
    inputs = _draw_scaled(draw, 7, growth_interval=2, max_norm=NO_LIMIT, clear=False)
    rng = draw.shared("unlucky")
    for name, step in zip("xy", 2 + rng.permutation(4)[:2], strict=True):
        inputs[int(rng.integers(draw.world_size))][f"{name}/{step}"][0, 0] = np.inf
    return inputs


def draw_clip(draw: Draw) -> list[Values]:
    """The scale never changes; the clipping limit is below the gradient's norm.

    The check clears the gradients: those that stay from an earlier step cost only
    `debug_amp_order`.
    """
    inputs = _draw_scaled(draw, 2, growth_interval=1000, max_norm=0.0, clear=True)
    case = Case(draw.world_size, inputs, [])
    size = _norm(_gradients(case, oracle.mlp(inputs[0], torch.float64), 0))
    for values in inputs:
        values["max_norm"] = 0.4 * size
    return inputs


def observe_scaled(subject: Any, inputs: Values, context: Context) -> Values:
    """The scale after each step, the gradient that each loss received, and the final weights."""
    amp_step, scaler_class = subject
    module = oracle.mlp(inputs).to(context.device)
    ddp_model = wrap(module, context)
    optimizer = torch.optim.SGD(module.parameters(), lr=AMP_LR)
    scaler = scaler_class(INIT_SCALE, inputs["growth_interval"])
    scales: list[float] = []
    incoming: list[float] = []
    for step in range(inputs["steps"]):
        x, y = (torch.from_numpy(inputs[f"{n}/{step}"]).to(context.device) for n in "xy")
        if inputs["clear"]:
            optimizer.zero_grad()
        loss = oracle.mse(ddp_model(x), y)
        loss.register_hook(lambda gradient: incoming.append(float(gradient)))
        amp_step(ddp_model, optimizer, scaler, loss, max_norm=inputs["max_norm"])
        scales.append(float(scaler.scale))
    answer: Values = {"scales": scales, "incoming": incoming}
    _told_parameters(answer, module)
    return answer


def _gradients(case: Case, model: nn.Module, step: int) -> list[np.ndarray]:
    model.zero_grad()
    x, y = _global_batch(case, step)
    oracle.mse(model(x), y).backward()
    return [oracle.grad_of(p).copy() for p in model.parameters()]


def _norm(gradients: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in gradients)))


def _expected(case: Case) -> tuple[list[np.ndarray], list[float]]:
    """The weights after all steps, and the scale after each step."""
    inputs = case.inputs[0]
    model = oracle.mlp(inputs, torch.float64)
    scale, good, scales = INIT_SCALE, 0, []
    for step in range(inputs["steps"]):
        gradients = _gradients(case, model, step)
        if all(np.isfinite(g).all() for g in gradients):
            factor = min(1.0, inputs["max_norm"] / (_norm(gradients) + 1e-6))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= AMP_LR * factor * torch.from_numpy(g)
            good += 1
            if good == inputs["growth_interval"]:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
        scales.append(scale)
    return [p.detach().numpy() for p in model.parameters()], scales


def _judge_scaled(case: Case, hint: str, *, with_scales: bool) -> Iterator[Finding]:
    parameters, scales = _expected(case)
    for rank, answer in enumerate(case.answers):
        got = told(answer, "scales")
        if with_scales and got != scales:
            yield Finding(
                f"the scale after each step: {got}, expected {scales}. It is updated once per "
                "step, and an overflow skips that step on every rank.",
                rank,
            )
            continue
        for i, expected in enumerate(parameters):
            if wrong := oracle.differs(
                rank,
                f"parameter {i} after {case.inputs[0]['steps']} steps",
                answer.get(f"p{i}"),
                expected,
                hint=hint,
            ):
                yield wrong
                break


def judge_scaler(case: Case) -> Iterable[Finding]:
    """Backward starts from the loss times the scale; gradients are divided by the same scale."""
    _, scales = _expected(case)
    expected = [INIT_SCALE, *scales[:-1]]
    for rank, answer in enumerate(case.answers):
        if told(answer, "scales") == scales and told(answer, "incoming") != expected:
            return [
                Finding(
                    f"backward began with {told(answer, 'incoming')}, one number per step, "
                    f"expected the scales {expected}: without it small gradients of fp16 are lost.",
                    rank,
                )
            ]
    return _judge_scaled(
        case,
        "In some of these steps the scale changes. Divide by the scale that this step's loss "
        "was multiplied with.",
        with_scales=True,
    )


def judge_clip(case: Case) -> Iterator[Finding]:
    """`max_norm` limits the norm of the true (unscaled) gradient."""
    return _judge_scaled(
        case,
        f"max_norm is {case.inputs[0]['max_norm']:.4g}, a limit for the true gradient: the "
        "one that is left when the scale is out.",
        with_scales=False,
    )
