"""Criteria for accumulation over ranks: what travels and when, on the emulated cluster.

Every layer is charged, so the broker knows when each micro-batch went forward and backward. The
broker also carries everything that travels. No judge here relies on what a rank reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common import oracle
from autograder.criteria.common.charged import find_ahead, reaches_all
from autograder.criteria.common.emulated import (
    charge_plan,
    charged_mlp,
    even_cluster,
    holds_run,
    is_compute,
    of_every_rank,
    seconds_since,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.simulate import simulate
from minidist.emulate.trace import Collective

LAYERS, WIDTH, SAMPLES = 4, 64, 2
MICRO_BATCHES, CALLS = 12, 3
FORWARD_S, BACKWARD_S = 1e-3, 2e-3
MICRO_BATCH_S = LAYERS * (FORWARD_S + BACKWARD_S)
NUM_PARAMETERS = 2 * LAYERS
GRADIENT_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
BUCKET_MB = 0.016  # makes DDP reduce each layer separately
MAX_COLLECTIVES = NUM_PARAMETERS + 3  # one per parameter, and a few for single numbers
MAX_BYTES = 2.5 * GRADIENT_BYTES  # the gradients in float64, and a few numbers
EFFICIENCY = 0.75
SYNC_TO_COMPUTE = 4 / 3  # time to reduce all gradients / compute time of a micro-batch
LATENCY_S = 20e-6


def grading_cluster(world_size: int) -> Cluster:
    """Slow links: one synchronisation takes longer than a micro-batch, for any number of ranks.

    Reducing after every micro-batch gives an efficiency of 0.5, even with the best overlap.
    Reducing once per `MICRO_BATCHES` gives over 0.9, or 0.8 in float64 without any overlap.
    """
    factor = 2 * (world_size - 1) / world_size
    bandwidth = factor * GRADIENT_BYTES / (SYNC_TO_COMPUTE * MICRO_BATCH_S)
    return even_cluster(world_size, bandwidth, LATENCY_S)


# --- draw and observe ----------------------------------------------------------------------------


def draw(source: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank, call and micro-batch."""
    sizes = [WIDTH] * (LAYERS + 1)
    start = oracle.draw_parameters(source.shared(), sizes)
    inputs = []
    for rank in range(source.world_size):
        batch = oracle.draw_batch(source.private(rank), CALLS * MICRO_BATCHES * SAMPLES, sizes)
        shape = (CALLS, MICRO_BATCHES, SAMPLES, WIDTH)
        inputs.append(start | {n: batch[n].reshape(shape) for n in "xy"})
    return inputs


def plan(source: Draw) -> ChargePlan:
    """What each layer costs, and the secret behind the factors."""
    return charge_plan(source, (FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS)


def _call(accumulate_ddp: Any, wrapped: Any, module: nn.Module, inputs: Values) -> Values:
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        module.zero_grad()
        pairs = zip(torch.from_numpy(xs), torch.from_numpy(ys), strict=True)
        accumulate_ddp(wrapped, list(pairs), oracle.mse)
    return {"done": True}


def observe_ddp(accumulate_ddp: Any, inputs: Values, context: Context) -> Values:
    """Accumulates several times with torch's DDP around the charged model."""
    module = charged_mlp(inputs, context.broker, torch.float32)
    wrapped = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB)
    return _call(accumulate_ddp, wrapped, module, inputs)


class DecidesInBackward(nn.Module):
    """A data-parallel wrapper that decides only in backward whether to synchronise, as FSDP does.

    If the student's code never calls the wrapper but only its module, it reduces gradients itself,
    so the wrapper does nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.device = next(module.parameters()).device  # attributes that torch's DDP has, too
        self.process_group = dist.group.WORLD
        self.require_backward_grad_sync = True
        self._is_used = False
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, p: torch.Tensor) -> None:
        if self._is_used and self.require_backward_grad_sync and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up and not reduced."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._is_used = True
        return self.module(*args, **kwargs)


def observe_backward(accumulate_ddp: Any, inputs: Values, context: Context) -> Values:
    """Like `observe_ddp`, with a wrapper that decides in backward."""
    module = charged_mlp(inputs, context.broker, torch.float32)
    return _call(accumulate_ddp, DecidesInBackward(module), module, inputs)


# --- what the broker saw -------------------------------------------------------------------------


class _LastCall:
    """What one rank sent in its last accumulation; earlier, DDP may still change its buckets."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rank, self.finding = rank, None
        events = case.trace.events[rank]
        layers = sum(e.kind == "compute" for e in events)
        expected = 2 * LAYERS * MICRO_BATCHES * CALLS
        if layers != expected:
            self.finding = Finding(
                f"{layers} forward and backward passes of layers, expected {expected}: each "
                "micro-batch goes forward and backward once.",
                rank,
            )
            return
        if ahead := find_ahead(events, rank, MICRO_BATCHES):
            self.finding = ahead
            return
        first = (CALLS - 1) * MICRO_BATCHES
        self.begin = next(i for i, e in enumerate(events) if is_compute(e, "forward", first))
        issued = {e.key for e in events[self.begin :] if e.kind == "issue"}
        self.collectives: list[Collective] = [
            c
            for c in case.trace.collectives
            if c.key in issued and "float" in c.dtype and reaches_all(c, case.world_size)
        ]
        self.num_bytes = sum(c.nbytes for c in self.collectives)

    def missing(self, case: Case) -> Finding | None:
        """A finding if this rank did not send the accumulated gradient of some parameter."""
        payloads = [c.payloads.get(self.rank) for c in self.collectives]
        sent = [p for p in payloads if p is not None]
        # A rank may divide by ranks or micro-batches, by both or by neither before it sends.
        divisors = (1, MICRO_BATCHES, case.world_size, MICRO_BATCHES * case.world_size)
        scales = {1 / divisor for divisor in divisors}
        for number, gradient in enumerate(_local_gradients(case, self.rank)):
            if not any(holds_run(payload, gradient, scales) for payload in sent):
                layer, name = number // 2, ("weight", "bias")[number % 2]
                return Finding(
                    f"the accumulated {name} gradient of layer {layer} did not travel in the last "
                    "accumulation: the sum over all micro-batches has to.",
                    self.rank,
                )
        return None


def _local_gradients(case: Case, rank: int) -> list[np.ndarray]:
    """This rank's own sum of gradients of the last call, in float64, with its secret factors."""
    inputs = case.inputs[rank]
    model = charged_mlp(inputs, PlanChannel(case.plan, rank), torch.float64)
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        model.zero_grad()
        for x, y in zip(torch.from_numpy(xs).double(), torch.from_numpy(ys).double(), strict=True):
            oracle.mse(model(x), y).backward()
    return [oracle.grad_of(p) for p in model.parameters()]


def _last_calls(case: Case) -> list[_LastCall] | list[Finding]:
    return of_every_rank(case, _LastCall)


# --- judge ---------------------------------------------------------------------------------------


def judge_collectives(case: Case) -> Iterator[Finding]:
    """Per accumulation all gradients travel once, in few collectives."""
    for call in _last_calls(case):
        if isinstance(call, Finding):
            yield call
        elif problem := (
            _too_many_bytes(call, "DDP decides in forward: is that inside no_sync() too?")
            or _too_many(call)
            or call.missing(case)
        ):
            yield problem


def judge_backward(case: Case) -> Iterator[Finding]:
    """With a wrapper that decides in backward, gradients travel once, too."""
    for call in _last_calls(case):
        if isinstance(call, Finding):
            yield call
        elif problem := (
            _too_many_bytes(
                call,
                "This wrapper decides in backward, as FSDP does: is that inside no_sync() too?",
            )
            or call.missing(case)
        ):
            yield problem


def _too_many_bytes(call: _LastCall, hint: str) -> Finding | None:
    if call.num_bytes > MAX_BYTES:
        return Finding(
            f"{call.num_bytes} bytes travelled for {MICRO_BATCHES} micro-batches, expected about "
            f"{GRADIENT_BYTES}, the gradients once. {hint}",
            call.rank,
        )
    return None


def _too_many(call: _LastCall) -> Finding | None:
    if len(call.collectives) > MAX_COLLECTIVES:
        return Finding(
            f"{len(call.collectives)} collectives for {MICRO_BATCHES} micro-batches of a model "
            f"with {NUM_PARAMETERS} parameters, expected at most {MAX_COLLECTIVES}. Whatever has "
            "to travel, the loss too, can travel once per accumulation.",
            call.rank,
        )
    return None


def judge_time(case: Case) -> list[Finding]:
    """At least `EFFICIENCY` of the virtual time of all calls but the first is compute."""
    calls = _last_calls(case)
    if isinstance(calls[0], Finding):
        return [call for call in calls if isinstance(call, Finding)]
    efficiency, call_s = scaling_efficiency(case)
    if efficiency < EFFICIENCY:
        return [
            Finding(
                f"efficiency {efficiency:.3f}, target {EFFICIENCY}: {MICRO_BATCHES} micro-batches "
                f"compute for {MICRO_BATCHES * MICRO_BATCH_S * 1e3:.0f} ms but take "
                f"{call_s * 1e3:.0f} ms of virtual time. On this cluster one synchronisation takes "
                f"{SYNC_TO_COMPUTE * MICRO_BATCH_S * 1e3:.0f} ms, so only one per accumulation "
                "pays."
            )
        ]
    found = [call.missing(case) for call in calls if isinstance(call, _LastCall)]
    return [finding for finding in found if finding]


def scaling_efficiency(case: Case) -> tuple[float, float]:
    """Compute time over virtual time of all calls but the first, and seconds per call."""
    timeline = simulate(case.trace, grading_cluster(case.world_size))
    call_s = seconds_since(case, timeline, MICRO_BATCHES) / (CALLS - 1)
    return MICRO_BATCHES * MICRO_BATCH_S / call_s, call_s
