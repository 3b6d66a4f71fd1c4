"""Criteria for accumulation over ranks: what travels and when, on the emulated cluster.

Every layer is charged, so the broker knows when each micro-batch went forward and backward. The
broker also carries everything that travels. The judges rely on what a rank reports only for memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common import oracle
from autograder.criteria.common.charged import find_ahead, find_disorder, reaches_all
from autograder.criteria.common.emulated import (
    charge_plan,
    charged_mlp,
    even_cluster,
    holds_run,
    is_compute,
    of_every_rank,
    seconds_each,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab2_accumulation.memory import EmulatedMemory, too_much_memory
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
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
MAX_NUMBERS = 1.5 * GRADIENT_BYTES / 4  # in all-reduces, in any dtype
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


def draw_pair_twice(source: Draw) -> list[Values]:
    """Like `draw`; the last micro-batch is the same pair of tensors as one before it."""
    inputs, twin = draw(source), int(source.shared("twin").integers(MICRO_BATCHES - 1))
    for values in inputs:
        values["twin"] = twin
        for name in "xy":
            values[name][:, twin] = values[name][:, -1]
    return inputs


def plan(source: Draw) -> ChargePlan:
    """What each layer costs, and the secret behind the factors."""
    return charge_plan(source, (FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS)


def _call(accumulate_ddp: Any, wrapped: Any, module: nn.Module, inputs: Values) -> Values:
    """Accumulates several times; the peak of activations, as a multiple of a micro-batch's."""
    memory = EmulatedMemory(float("inf"))
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        module.zero_grad()
        pairs = list(zip(torch.from_numpy(xs), torch.from_numpy(ys), strict=True))
        if "twin" in inputs:
            pairs[inputs["twin"]] = pairs[-1]
        with memory.watch():
            accumulate_ddp(wrapped, pairs, oracle.mse)
    one = memory.kept_bytes / (CALLS * MICRO_BATCHES)
    return {"peak": [memory.peak_bytes / max(1.0, one), 1.0]}


def observe_ddp(accumulate_ddp: Any, inputs: Values, context: Context) -> Values:
    """Accumulates several times with torch's DDP around the charged model."""
    module = charged_mlp(inputs, context.broker, torch.float32)
    wrapped = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB)
    return _call(accumulate_ddp, wrapped, module, inputs)


class DecidesInBackward(nn.Module):
    """A data-parallel wrapper that decides only in backward whether to synchronise, as FSDP does.

    If the student's code calls only the module, never the wrapper, the wrapper does nothing: such
    code reduces gradients itself.
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


class _Call:
    """What one rank sent in one accumulation."""

    def __init__(self, case: Case, rank: int, call: int) -> None:
        self.rank, self.call, self.finding = rank, call, None
        events = case.trace.events[rank]
        layers = sum(e.kind == "compute" for e in events)
        expected = 2 * LAYERS * MICRO_BATCHES * CALLS
        if layers != expected:
            self.finding = Finding(
                f"{layers} forward and backward passes of layers, expected {expected} ({LAYERS} "
                f"layers, {MICRO_BATCHES} micro-batches, {CALLS} calls): each micro-batch goes "
                "forward and backward once, by itself.",
                rank,
            )
            return
        if ahead := find_ahead(events, rank, MICRO_BATCHES) or find_disorder(events, rank):
            self.finding = ahead
            return
        first, later = (c * MICRO_BATCHES for c in (call, call + 1))
        begin = next(i for i, e in enumerate(events) if is_compute(e, "forward", first))
        ends = (i for i, e in enumerate(events) if is_compute(e, "forward", later))
        span = events[begin : next(ends, len(events))]
        issued = {e.key for e in span if e.kind == "issue"}
        self.waited = {e.key for e in span if e.kind == "wait"}
        self.collectives: list[Collective] = [
            c
            for c in case.trace.collectives
            if c.key in issued and "float" in c.dtype and reaches_all(c, case.world_size)
        ]
        self.num_bytes = sum(c.nbytes for c in self.collectives)
        self.num_numbers = sum(c.numel for c in self.collectives if c.kind == "all_reduce")
        self.backwards = False  # the micro-batches went through the model in reversed order

    def missing(self, case: Case, waits: bool = False) -> Finding | None:
        """A finding if this rank did not send the accumulated gradient of some parameter.

        Args:
            waits: the rank must also have waited for the collective before the next accumulation.
        """
        for number, by in enumerate(self._carriers(case)):
            what = (
                f"the accumulated {('weight', 'bias')[number % 2]} gradient of layer {number // 2}"
            )
            if not by:
                # If gradients travelled too early, the last payload holds means of all ranks.
                return self.too_many_numbers(case) or Finding(
                    f"{what} did not travel in accumulation {self.call}: the sum over all "
                    "micro-batches has to.",
                    self.rank,
                )
            if waits and not any(c.key in self.waited for c in by):
                return Finding(
                    f"{what}: in accumulation {self.call} nobody waited until it had travelled.",
                    self.rank,
                )
        return None

    def too_many_numbers(self, case: Case) -> Finding | None:
        """A finding if gradients travelled more than once."""
        if self.num_numbers <= MAX_NUMBERS:
            return None
        times, twin = self.num_numbers / (GRADIENT_BYTES / 4), case.inputs[self.rank].get("twin")
        return Finding(
            f"as many numbers travelled as {times:.1f} times the gradients: only the last of "
            f"{MICRO_BATCHES} micro-batches should synchronise, and what DDP has averaged should "
            "not travel again."
            + (
                f" (Number {twin} is the same pair of tensors as the last one: only its place "
                "tells it apart.)"
                if twin is not None
                else ""
            ),
            self.rank,
        )

    def _carriers(self, case: Case) -> list[list[Collective]]:
        """Per parameter the collectives that carried its accumulated gradient.

        The order of the micro-batches is not judged here.
        """
        sent = [c for c in self.collectives if c.payloads.get(self.rank) is not None]
        # A rank may divide by ranks or micro-batches, by both or by neither before it sends.
        # Whoever divides by the ranks although DDP does it loses `accum_ddp_gradients` only.
        divisors = {a * b for a in (1, MICRO_BATCHES) for b in (1, case.world_size)}
        scales = {1 / d for d in divisors | {d * case.world_size for d in divisors}}

        def find(gradients: list[np.ndarray]) -> list[list[Collective]]:
            return [
                [c for c in sent if holds_run(c.payloads[self.rank], g, scales)] for g in gradients
            ]

        straight = find(_local_gradients(case, self.rank, self.call))
        if all(straight):
            return straight
        reversed_ = find(_local_gradients(case, self.rank, self.call, reverse=True))
        if all(reversed_):
            self.backwards = True
            return reversed_
        return straight


def _local_gradients(case: Case, rank: int, call: int, reverse: bool = False) -> list[np.ndarray]:
    """This rank's own sum of gradients of a call, in float64, with its secret factors.

    If the rank kept several graphs alive, this model does so, too: the factors depend on the order
    in which layers ask for them.

    Args:
        reverse: the last micro-batch goes first.
    """
    inputs = case.inputs[rank]
    together = case.trace is not None and _alive(case, rank) is not None
    model = charged_mlp(inputs, PlanChannel(case.plan, rank), torch.float64)
    for xs, ys in zip(inputs["x"][: call + 1], inputs["y"][: call + 1], strict=True):
        model.zero_grad()
        pairs = list(zip(torch.from_numpy(xs).double(), torch.from_numpy(ys).double(), strict=True))
        losses = []
        for x, y in reversed(pairs) if reverse else pairs:
            losses.append(oracle.mse(model(x), y))
            if not together:
                losses.pop().backward()
        if together:
            torch.stack(losses).sum().backward()
    return [oracle.grad_of(p) for p in model.parameters()]


def _last_calls(case: Case) -> list[_Call] | list[Finding]:
    """The last accumulation of each rank; before it, DDP may still change its buckets."""
    return of_every_rank(case, partial(_Call, call=CALLS - 1))


def _alive(case: Case, rank: int) -> Finding | None:
    """A finding if more than two micro-batches were between forward and backward at once.

    One micro-batch may go forward before the backward of the one before it.
    """
    ended = -1
    for event in case.trace.events[rank]:
        if event.kind != "compute" or event.step is None:
            continue
        if event.direction == "backward" and event.layer == 0:
            ended = max(ended, event.step)
        elif event.direction == "forward" and event.step > ended + 2:
            return Finding(
                f"micro-batch {event.step % MICRO_BATCHES} went forward while the activations of "
                "two others were still in memory: call backward() of a micro-batch before the next "
                "one goes forward.",
                rank,
            )
    return None


# --- judge ---------------------------------------------------------------------------------------


def judge_collectives(case: Case) -> Iterator[Finding]:
    """Per accumulation all gradients travel once, in few collectives; no graphs are kept alive.

    The loss may travel alone or with the gradients. For graphs that are kept alive, see `_alive`.
    """
    for call in _last_calls(case):
        if isinstance(call, Finding):
            yield call
        elif problem := (
            _too_many_bytes(call, "DDP decides in forward: is that inside no_sync() too?")
            or call.too_many_numbers(case)
            or _too_many(call)
            or call.missing(case)
            or _in_other_order(call)
            or _alive(case, call.rank)
            or too_much_memory(case.answers[call.rank].get("peak"), call.rank)
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


def _too_many_bytes(call: _Call, hint: str) -> Finding | None:
    if call.num_bytes > MAX_BYTES:
        return Finding(
            f"{call.num_bytes} bytes travelled for {MICRO_BATCHES} micro-batches, expected about "
            f"{GRADIENT_BYTES}, the gradients once. {hint}",
            call.rank,
        )
    return None


def _in_other_order(call: _Call) -> Finding | None:
    if call.backwards:
        return Finding("the micro-batches went forward in reversed order.", call.rank)
    return None


def _too_many(call: _Call) -> Finding | None:
    if len(call.collectives) > MAX_COLLECTIVES:
        return Finding(
            f"{len(call.collectives)} collectives for {MICRO_BATCHES} micro-batches of a model "
            f"with {NUM_PARAMETERS} parameters, expected at most {MAX_COLLECTIVES}. Whatever has "
            "to travel, the loss too, can travel once per accumulation.",
            call.rank,
        )
    return None


def judge_time(case: Case) -> list[Finding]:
    """At least `EFFICIENCY` of the virtual time of all calls but the first is compute.

    In each call that is timed, all gradients travel and are waited for.
    """
    calls: list[_Call] = []
    for number in range(1, CALLS):
        found = of_every_rank(case, partial(_Call, call=number))
        if findings := [it for it in found if isinstance(it, Finding)]:
            return findings
        calls += found  # type: ignore[arg-type]
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
    missing = (call.missing(case, waits=True) for call in calls)
    return list({finding.rank: finding for finding in missing if finding}.values())


def scaling_efficiency(case: Case) -> tuple[float, float]:
    """Compute time over virtual time of all calls but the first, and seconds per call."""
    call_s = seconds_each(case, grading_cluster(case.world_size), MICRO_BATCHES, CALLS - 1)
    return MICRO_BATCHES * MICRO_BATCH_S / call_s, call_s
