"""Criteria for throughput, traffic, and the choice of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autograder.criteria.common.answers import is_close, item_of, returned, unit_hint
from autograder.criteria.common.places import LAST_ALONE
from autograder.criteria.common.timed_collectives import (
    COLLECTIVE_S,
    LAUNCH_S,
    QueueingDevice,
    TimedCollectives,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp.memory import STRATEGIES, plain, state_bytes

# --- throughput ----------------------------------------------------------------------------------


def draw_throughput(draw: Draw) -> list[Values]:
    """Slow first steps; a different slowest rank in each case; batches of different sizes."""
    rng = draw.shared()
    settings = [[int(rng.integers(2, 5)), int(rng.integers(3, 9))] for _ in range(2)] + [[0, 4]]
    order = rng.permutation(draw.world_size)  # on three ranks, each is the slowest once
    slowest = [int(order[case % draw.world_size]) for case in range(3)]
    efficiency = [
        [alone, float(share) * alone * ranks, ranks]
        for share in (rng.uniform(0.2, 0.5), rng.uniform(0.6, 0.9), rng.uniform(1.1, 1.4))
        for alone, ranks in [(float(rng.uniform(50, 500)), int(rng.integers(2, 65)))]
    ]
    inputs = []
    for rank in range(draw.world_size):
        own = draw.private(rank)
        values: Values = {"settings": settings, "efficiency": efficiency, "work": []}
        values["begin"] = float(own.integers(10**5, 10**6))
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
        machine = QueueingDevice(inputs["work"][number], inputs["begin"], hides_early=True)
        with TimedCollectives(machine.communicate):
            result = throughput(
                machine.step,
                inputs["samples"][number],
                machine.synchronize,
                context.device,
                warmup=warmup,
                repeats=repeats,
                clock=machine.clock,
            )
        told.append(plain(returned(result, "throughput")))
        calls.append(machine.calls)
    shares = [
        plain(returned(scaling_efficiency(*row), "scaling_efficiency"))
        for row in inputs["efficiency"]
    ]
    return {"told": told, "calls": calls, "shares": shares}


def judge_throughput(case: Case) -> Iterator[Finding]:
    """All ranks' samples / the slowest rank's seconds; throughput / (N x one rank's throughput).

    Collectives before the first look at the clock and after the last one are allowed.
    """
    for rank, answer in enumerate(case.answers):
        problem = _throughput_problem(case, rank, answer) or _efficiency_problem(case, answer)
        if problem:
            yield Finding(problem, rank)


def _throughput_problem(case: Case, rank: int, answer: Values) -> str:
    for number, (warmup, repeats) in enumerate(case.inputs[0]["settings"]):
        seconds = [LAUNCH_S + sum(i["work"][number][warmup:]) for i in case.inputs]
        samples = [i["samples"][number] * repeats for i in case.inputs]
        expected = sum(samples) / max(seconds)
        got, calls = item_of(answer.get("told"), number), item_of(answer.get("calls"), number)
        what = f"throughput with warmup={warmup}, repeats={repeats}"
        if calls != warmup + repeats:
            return f"{what}: step() was called {calls} times, expected {warmup + repeats}."
        if not isinstance(got, float):
            return f"{what}: expected a float, got {got!r}."
        if is_close(got, expected, rtol=1e-5):
            continue
        whole = [LAUNCH_S + sum(i["work"][number]) for i in case.inputs]
        waits = max(seconds) + (repeats - 1) * LAUNCH_S
        rates = sum(s / t for s, t in zip(samples, seconds, strict=True))
        known = (
            (samples[rank] / max(seconds), f"Those are this rank's samples only. {LAST_ALONE}"),
            (samples[rank] / seconds[rank], f"That is this rank's own throughput. {LAST_ALONE}"),
            (rates, "That is the sum of the ranks' own rates; all wait for the slowest."),
            (
                samples[rank] * case.world_size / max(seconds),
                "Ranks may have different numbers of samples: add them up.",
            ),
            (sum(samples) / max(whole), "The warm-up steps were timed as well."),
            (sum(samples) / seconds[rank], "Those are this rank's seconds, not the slowest's."),
            (sum(samples) / min(seconds), "Those are the seconds of the fastest rank."),
            (expected / repeats, "Those are the samples of one step only."),
            (1 / expected, "That is seconds per sample."),
            (
                sum(samples) / (max(seconds) + COLLECTIVE_S),
                "A collective was timed as well: synchronize() comes right before each look.",
            ),
            (sum(samples) / waits, "The device was waited for after each step; once is enough."),
            (
                sum(samples) / (repeats * LAUNCH_S),
                "That is how fast steps are queued: synchronize() before the second look.",
            ),
        )
        hint = next((why for value, why in known if is_close(got, value, rtol=1e-5)), "")
        hint = hint or unit_hint(got, expected)
        return f"{what}: expected {expected:.3f} samples/s, got {got:.3f}. {hint}".rstrip()
    return ""


def _efficiency_problem(case: Case, answer: Values) -> str:
    for number, (alone, together, ranks) in enumerate(case.inputs[0]["efficiency"]):
        got, expected = item_of(answer.get("shares"), number), together / (ranks * alone)
        if not is_close(got, expected):
            call = f"scaling_efficiency({alone:.1f}, {together:.1f}, {ranks})"
            return f"{call}: expected {expected:.4f}, got {got}."
    return ""


# --- traffic and choice --------------------------------------------------------------------------


def draw_choice(draw: Draw) -> list[Values]:
    """For each strategy, a budget that is exactly enough, and one that is a byte too small.

    Several ranks never divide the number of parameters. A number has 4 bytes, the default, only in
    the call without that argument.
    """
    rng = draw.shared()

    def sizes() -> tuple[int, int]:
        ranks = int(rng.integers(4, 30))
        return int(rng.integers(10**5, 10**7)) * ranks + int(rng.integers(1, ranks)), ranks

    rows = []
    for strategy in STRATEGIES:
        for mixed in (False, True):
            for short in (0, 1):
                n, ranks = sizes()
                rows.append([n, ranks, sum(state_bytes(n, ranks, strategy, mixed)) - short, mixed])
    traffic: list[list[Any]] = [
        [*sizes(), strategy, size] for strategy in STRATEGIES for size in (2, 8)
    ]
    traffic.append([*sizes(), "zero3", None])
    traffic.append([int(rng.integers(10**5, 10**7)), 1, "zero3", 2])  # one rank sends nothing
    # The right result of this row is no whole number.
    traffic.append([7 * int(rng.integers(3, 9)) + int(rng.integers(1, 7)), 7, "ddp", 2])
    values = {
        "rows": [rows[i] for i in rng.permutation(len(rows))],
        "traffic": [traffic[i] for i in rng.permutation(len(traffic))],
    }
    return [values for _ in range(draw.world_size)]


def observe_choice(subject: Any, inputs: Values, context: Context) -> Values:
    """What both functions return."""
    traffic_per_rank, choose_strategy = subject
    return {
        "chosen": [
            plain(returned(choose_strategy(n, ranks, budget, mixed=mixed), "choose_strategy"))
            for n, ranks, budget, mixed in inputs["rows"]
        ],
        "traffic": [
            plain(
                returned(
                    traffic_per_rank(n, ranks, strategy, *([] if size is None else [size])),
                    "traffic_per_rank",
                )
            )
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
        once = (ranks - 1) / ranks * n * (size or 4)
        got = item_of(answer.get("traffic"), number)
        if is_close(got, passes * once):
            continue
        hint = ""
        if is_close(got, once) or is_close(got, 2 * once) or is_close(got, 3 * once):
            hint = " Each all-gather and each reduce-scatter is one pass, an all-reduce is two."
        elif is_close(got, passes * once / (size or 4) * 4):
            hint = " A number does not always have 4 bytes."
        elif unit := unit_hint(got, passes * once):
            hint = f" {unit}"
        call = f"traffic_per_rank({n}, {ranks}, {strategy!r}{'' if size is None else f', {size}'})"
        shown = f"{got:.12g}" if isinstance(got, float) else got
        return f"{call}: expected {passes * once:.12g}, got {shown}.{hint}"
    return ""


def _choice_problem(case: Case, answer: Values) -> str:
    for number, (n, ranks, budget, mixed) in enumerate(case.inputs[0]["rows"]):
        totals = {s: sum(state_bytes(n, ranks, s, mixed)) for s in STRATEGIES}
        expected = next((s for s, total in totals.items() if total <= budget), "offload")
        got = item_of(answer.get("chosen"), number)
        if got != expected:
            return (
                f"choose_strategy({n}, {ranks}, {budget}, mixed={mixed}): expected {expected!r}, "
                f"got {got!r}. The four need {', '.join(map(str, totals.values()))} bytes."
                f""
            )
    return ""
