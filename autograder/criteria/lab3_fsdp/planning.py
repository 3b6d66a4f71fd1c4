"""Criteria for throughput, traffic, and the choice of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp.memory import STRATEGIES, plain, state_bytes

# --- throughput ----------------------------------------------------------------------------------

LAUNCH_S = 1e-4


class QueueingDevice:
    """A simulated device with a work queue and a clock; no real time passes."""

    def __init__(self, work_s: list[float]) -> None:
        self.work_s, self.now_s, self.queued_s, self.calls = work_s, 0.0, 0.0, 0

    def step(self) -> None:
        """Queues the next step."""
        work = self.work_s[min(self.calls, len(self.work_s) - 1)]
        self.calls += 1
        self.now_s += LAUNCH_S
        self.queued_s += work

    def synchronize(self) -> None:
        """Waits until the queue is empty."""
        self.now_s += self.queued_s
        self.queued_s = 0.0

    def clock(self) -> float:
        """Seconds."""
        return self.now_s


def draw_throughput(draw: Draw) -> list[Values]:
    """Slow first steps; a random slowest rank in each case; batches of different sizes."""
    rng = draw.shared()
    settings = [[int(rng.integers(2, 5)), int(rng.integers(3, 9))] for _ in range(2)] + [[0, 4]]
    slowest = [int(r) for r in rng.integers(draw.world_size, size=3)]
    efficiency = [
        [float(rng.uniform(50, 500)), float(rng.uniform(300, 4000)), int(rng.integers(2, 65))]
        for _ in range(3)
    ]
    inputs = []
    for rank in range(draw.world_size):
        own = draw.private(rank)
        values: Values = {"settings": settings, "efficiency": efficiency, "work": []}
        values["samples"] = [int(v) for v in own.integers(3, 40, size=3)]
        for number, (warmup, repeats) in enumerate(settings):
            work = own.uniform(2e-3, 3e-3, warmup + repeats) + 2e-3 * (rank == slowest[number])
            work[:warmup] *= 30
            values["work"].append([float(w) for w in work])
        inputs.append(values)
    return inputs


def observe_throughput(subject: Any, inputs: Values, context: Context) -> Values:
    """What both functions return, and how often `throughput` called a step."""
    throughput, scaling_efficiency = subject
    told, calls = [], []
    for number, (warmup, repeats) in enumerate(inputs["settings"]):
        machine = QueueingDevice(inputs["work"][number])
        told.append(
            float(
                throughput(
                    machine.step,
                    inputs["samples"][number],
                    machine.synchronize,
                    context.device,
                    warmup=warmup,
                    repeats=repeats,
                    clock=machine.clock,
                )
            )
        )
        calls.append(machine.calls)
    shares = [float(scaling_efficiency(*row)) for row in inputs["efficiency"]]
    return {"told": told, "calls": calls, "shares": shares}


def judge_throughput(case: Case) -> Iterator[Finding]:
    """All ranks' samples / the slowest rank's seconds; throughput / (N x one rank's throughput)."""
    for rank, answer in enumerate(case.answers):
        problem = _throughput_problem(case, rank, answer) or _efficiency_problem(case, answer)
        if problem:
            yield Finding(problem, rank)


def _throughput_problem(case: Case, rank: int, answer: Values) -> str:
    for number, (warmup, repeats) in enumerate(case.inputs[0]["settings"]):
        seconds = [repeats * LAUNCH_S + sum(i["work"][number][warmup:]) for i in case.inputs]
        samples = [i["samples"][number] * repeats for i in case.inputs]
        expected = sum(samples) / max(seconds)
        got, calls = _entry(answer, "told", number), _entry(answer, "calls", number)
        what = f"throughput with warmup={warmup}, repeats={repeats}"
        if calls != warmup + repeats:
            return f"{what}: step() was called {calls} times, expected {warmup + repeats}."
        if not isinstance(got, float) or not abs(got - expected) <= 1e-5 * expected:
            own = samples[rank] / seconds[rank]
            rates = sum(s / t for s, t in zip(samples, seconds, strict=True))
            whole = [
                LAUNCH_S * len(i["work"][number]) + sum(i["work"][number]) for i in case.inputs
            ]
            hint = "Is the queue empty at both looks at the clock?"
            for value, reason in (
                (own, "That is this rank's own throughput."),
                (samples[rank] / max(seconds), "Those are this rank's samples only."),
                (rates, "That is the sum of the ranks' own rates; all wait for the slowest."),
                (
                    samples[rank] * case.world_size / max(seconds),
                    "Ranks may have other numbers of samples than this one: add them up.",
                ),
                (sum(samples) / max(whole), "The warm-up steps were timed as well."),
                (
                    sum(samples) / (repeats * LAUNCH_S),
                    "That is how fast steps are queued: synchronize() before the second look.",
                ),
            ):
                if isinstance(got, float) and abs(got - value) <= 1e-5 * value:
                    hint = reason
                    break
            shown = f"{got:.3f}" if isinstance(got, float) else repr(got)
            return f"{what}: expected {expected:.3f} samples/s, got {shown}. {hint}"
    return ""


def _efficiency_problem(case: Case, answer: Values) -> str:
    for number, (alone, together, ranks) in enumerate(case.inputs[0]["efficiency"]):
        got, expected = _entry(answer, "shares", number), together / (ranks * alone)
        if not isinstance(got, float) or not abs(got - expected) <= 1e-6 * expected:
            call = f"scaling_efficiency({alone:.1f}, {together:.1f}, {ranks})"
            return f"{call}: expected {expected:.4f}, got {got}."
    return ""


def _entry(answer: Values, key: str, number: int) -> Any:
    values = answer.get(key)
    return values[number] if isinstance(values, list) and number < len(values) else None


# --- traffic and choice --------------------------------------------------------------------------


def draw_choice(draw: Draw) -> list[Values]:
    """Budgets just enough for each strategy, exact for zero1, and one byte too small for zero3."""
    rng = draw.shared()
    rows, traffic = [], []
    for strategy in (*STRATEGIES, None):
        mixed, ranks = bool(rng.integers(2)), int(rng.integers(4, 30))
        n = int(rng.integers(10**6, 10**9))
        if strategy is None:
            budget = sum(state_bytes(n, ranks, "zero3", mixed)) - 1
        else:
            budget = sum(state_bytes(n, ranks, strategy, mixed)) + int(rng.integers(3))
        rows.append([n, ranks, budget, mixed, strategy or "offload"])
    for mixed in (False, True):
        n, ranks = int(rng.integers(10**6, 10**9)), int(rng.integers(4, 30))
        rows.append([n, ranks, sum(state_bytes(n, ranks, "zero1", mixed)), mixed, "zero1"])
    rows = [rows[i] for i in rng.permutation(len(rows))]
    for strategy in STRATEGIES:
        size = int(rng.choice([2, 4]))
        traffic.append([int(rng.integers(10**5, 10**8)), int(rng.integers(2, 60)), strategy, size])
    secret = [row[-1] for row in rows]
    values = {"rows": [row[:-1] for row in rows], "traffic": traffic}
    assert len(secret) == len(rows)
    return [values for _ in range(draw.world_size)]


def observe_choice(subject: Any, inputs: Values, context: Context) -> Values:
    """What both functions return."""
    traffic_per_rank, choose_strategy = subject
    return {
        "chosen": [
            plain(choose_strategy(n, ranks, budget, mixed=mixed))
            for n, ranks, budget, mixed in inputs["rows"]
        ],
        "traffic": [
            plain(traffic_per_rank(n, ranks, strategy, size))
            for n, ranks, strategy, size in inputs["traffic"]
        ],
    }


def judge_choice(case: Case) -> Iterator[Finding]:
    """Traffic: 2 or 3 passes of (N-1)/N of the bytes. Choice: the least sharding that fits."""
    for rank, answer in enumerate(case.answers):
        problem = _traffic_problem(case, answer) or _choice_problem(case, answer)
        if problem:
            yield Finding(problem, rank)


def _traffic_problem(case: Case, answer: Values) -> str:
    for number, (n, ranks, strategy, size) in enumerate(case.inputs[0]["traffic"]):
        passes = 3 if strategy == "zero3" else 2
        expected = passes * (ranks - 1) / ranks * n * size
        got = _entry(answer, "traffic", number)
        if not isinstance(got, int | float) or not abs(got - expected) <= 1e-6 * expected:
            return (
                f"traffic_per_rank({n}, {ranks}, {strategy!r}, {size}): expected {expected:.6g}, "
                f"got {got}. Count the passes: each all-gather and each reduce-scatter is one, an "
                "all-reduce is two."
            )
    return ""


def _choice_problem(case: Case, answer: Values) -> str:
    for number, (n, ranks, budget, mixed) in enumerate(case.inputs[0]["rows"]):
        totals = {s: sum(state_bytes(n, ranks, s, mixed)) for s in STRATEGIES}
        expected = next((s for s, total in totals.items() if total <= budget), "offload")
        got = _entry(answer, "chosen", number)
        if got != expected:
            return (
                f"choose_strategy({n}, {ranks}, {budget}, mixed={mixed}): expected {expected!r}, "
                f"got {got!r}. The four need {', '.join(map(str, totals.values()))} bytes."
            )
    return ""
