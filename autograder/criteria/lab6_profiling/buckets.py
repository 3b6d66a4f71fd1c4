"""Criteria for planning buckets: which gradients travel together, and how long a step takes.

Everything here is arithmetic on drawn networks; nothing runs and nothing is timed. Some networks
have a high latency, so small buckets are bad. Others have a low bandwidth, so large buckets are
bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from autograder.criteria.common.answers import (
    as_number,
    described_scalar,
    is_close,
    item_of,
    naming,
    read,
    short,
    unchanged,
    unit_hint,
)
from autograder.criteria.criterion import Case, Context, Finding, Values, integer, per_rank

SLACK = 1.04  # a step may take this many times as long as with the best equal caps
MAX_MEASUREMENTS = 64

Plan = list[list[int]]


def step_seconds(
    plan: Plan,
    sizes: Sequence[float],
    backward_s: Sequence[float],
    forward_s: float,
    all_reduce_s: Callable[[float], float],
) -> float:
    """Seconds of a step: buckets travel one after another, each once its gradients are ready."""
    ready = forward_s + np.cumsum(np.asarray(backward_s)[::-1])[::-1]
    free = 0.0
    for bucket in plan:
        free = max(free, float(ready[bucket].max())) + all_reduce_s(sum(sizes[i] for i in bucket))
    return max(float(ready[0]), free)


def fill_buckets(sizes: Sequence[float], cap: float) -> Plan:
    """Buckets from the last gradient to the first, with as many gradients as fit under the cap."""
    plan: Plan = []
    total = 0.0
    for index, size in sorted(enumerate(sizes), reverse=True):
        if plan and total + size <= cap:
            plan[-1].append(index)
            total += size
        else:
            plan.append([index])
            total = size
    return plan


def best_plan(sizes: Sequence[float], measure: Callable[[Plan], float]) -> Plan:
    """The best of the plans that use one cap for all buckets."""
    total = float(sum(sizes))
    plans = [fill_buckets(sizes, total / k * (1 + 1e-9)) for k in range(1, len(sizes) + 1)]
    return min([*plans, fill_buckets(sizes, 0.0)], key=measure)


def read_plan(value: Any, what: str) -> Plan:
    """A student's plan as lists of ints."""

    def reader(plan: Any) -> Plan:
        return [[integer(i, what) for i in bucket] for bucket in plan]

    return read(value, reader, what, "a list of lists of indices")


# --- plan_buckets --------------------------------------------------------------------------------


@per_rank
def draw_plans(rng: np.random.Generator) -> Values:
    """Sizes with a gradient that exceeds most caps, and with a bucket that is exactly full."""
    cases: list[Any] = []
    for number in range(5):
        unit = int(rng.integers(100, 5000)) * 4
        sizes = (rng.integers(1, 6, int(rng.integers(9, 20))) * unit).tolist()
        sizes[int(rng.integers(len(sizes)))] = 20 * unit
        sizes[-2:] = [2 * unit, 3 * unit]  # together exactly the first cap, 5 units
        cap = (5, 8, 10, 1, 500)[number] * unit
        if number == 2:  # a fractional cap, as sum(sizes) / k may be; 10 units exceed it
            sizes[-3:] = [3 * unit, 4 * unit, 3 * unit]
            cap -= 0.25
        cases.append({"sizes": sizes, "cap": cap})
    cases.append({"sizes": [], "cap": 100})  # nothing to send: no bucket, and no empty one
    return {"cases": cases}


def observe_plans(plan_buckets: Any, inputs: Values, context: Context) -> Values:
    """The plan for every case."""
    plans = []
    for case in inputs["cases"]:
        sizes = list(case["sizes"])
        with naming(f"plan_buckets({sizes}, {case['cap']})"):
            plans.append(read_plan(plan_buckets(sizes, case["cap"]), "plan_buckets"))
        unchanged("plan_buckets", "sizes", sizes, case["sizes"])
    return {"plans": plans}


def judge_plans(case: Case) -> Iterator[Finding]:
    """Reverse order, as many gradients as fit; only a single gradient may exceed the cap.

    The order within a bucket is free.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, drawn in enumerate(inputs["cases"]):
            sizes, cap = drawn["sizes"], drawn["cap"]
            wanted, got = fill_buckets(sizes, cap), item_of(answer.get("plans"), number)
            if [sorted(b) for b in wanted] != _sorted_buckets(got):
                yield Finding(
                    f"sizes {sizes}, cap {cap}: expected {wanted}, got {got!r}."
                    f"{_explain_plan(got, sizes, cap)}",
                    rank,
                )
                break


def _sorted_buckets(plan: Any) -> list[Any] | None:
    if not isinstance(plan, list) or not all(isinstance(b, list) for b in plan):
        return None
    if not all(isinstance(i, int) for b in plan for i in b):
        return None
    return [sorted(bucket) for bucket in plan]


def _explain_plan(got: Any, sizes: list[int], cap: float) -> str:
    plan = _sorted_buckets(got)
    if plan is None:
        return ""
    if any(not bucket for bucket in plan):
        return " A bucket is empty."
    flat = sorted(i for bucket in plan for i in bucket)
    if flat != list(range(len(sizes))):
        return " Each gradient belongs to exactly one bucket."
    if plan[0][-1] != len(sizes) - 1:
        return " Backward delivers the last gradient first: begin there."
    if any(len(b) > 1 and sum(sizes[i] for i in b) > cap for b in plan):
        return " A bucket is larger than the cap though it holds several gradients."
    return " A bucket was closed though the next gradient would have fitted."


# --- predict_step --------------------------------------------------------------------------------


def draw_network(rng: np.random.Generator, latency: float, transfer: float, count: int) -> Values:
    """Layers and a network, in seconds and bytes.

    Args:
        latency: fixed cost of one all-reduce per layer, as a fraction of the backward pass.
        transfer: time to transfer all gradients, as a fraction of the backward pass.
    """
    scale = float(10 ** rng.uniform(-3, 0))
    backward = rng.uniform(0.8, 1.2, count)
    backward *= scale / backward.sum()
    sizes = rng.integers(600, 1400, count) * 4
    return {
        "sizes": sizes.tolist(),
        "backward_s": backward.tolist(),
        "forward_s": float(rng.uniform(0.45, 0.55)) * scale,
        "fixed_s": latency * scale / count,
        "s_per_byte": transfer * scale / float(sizes.sum()),
    }


def all_reduce_of(network: Values) -> Callable[[float], float]:
    """The function that gives the seconds of an all-reduce from its bytes."""
    return lambda nbytes: network["fixed_s"] + network["s_per_byte"] * nbytes


@per_rank
def draw_predictions(rng: np.random.Generator) -> Values:
    """Plans in reverse order, two of them on a fast network, and plans in random order.

    The last two plans leave out gradients: one those that backward delivers last, the other one
    those of a bucket in the middle.
    """
    cases: list[Any] = []
    for number in range(8):
        count = int(rng.integers(6, 12))
        network = draw_network(
            rng, float(rng.uniform(0.2, 1.5)), float(rng.uniform(0.2, 1.2)), count
        )
        order = list(reversed(range(count)))
        if number in (3, 4):  # random order, in which the buckets also travel
            order = [int(i) for i in rng.permutation(count)]
        cuts = sorted({int(c) for c in rng.integers(1, count, 3)})
        if number in (0, 6, 7):  # a network so fast that only the last bucket is exposed
            network |= {"fixed_s": 0.0, "s_per_byte": network["s_per_byte"] / 20}
        if number == 5:  # one bucket
            cuts = []
        if number == 7:
            cuts = [1, 3]
        bounds = zip([0, *cuts], [*cuts, count], strict=True)
        plan = [order[a:b] for a, b in bounds]
        if number in (6, 7):
            del plan[-1 if number == 6 else 1]
        cases.append(network | {"plan": plan})
    return {"cases": cases}


def observe_predictions(predict_step: Any, inputs: Values, context: Context) -> Values:
    """Predicted seconds for every case."""
    seconds = []
    for case in inputs["cases"]:
        lists: Values = {
            "plan": [list(bucket) for bucket in case["plan"]],
            "sizes": list(case["sizes"]),
            "backward_s": list(case["backward_s"]),
        }
        with naming(f"predict_step({case['plan']}, …) for {len(case['sizes'])} gradients"):
            found = predict_step(*lists.values(), case["forward_s"], all_reduce_of(case))
            seconds.append(described_scalar(found))
        for name, value in lists.items():
            unchanged("predict_step", name, value, case[name])
    return {"seconds": seconds}


def judge_predictions(case: Case) -> Iterator[Finding]:
    """The predicted seconds equal those of `step_seconds`."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, drawn in enumerate(inputs["cases"]):
            got = item_of(answer.get("seconds"), number)
            wanted = _seconds(drawn, drawn["plan"])
            if not is_close(got, wanted):
                yield Finding(
                    f"{len(drawn['sizes'])} gradients, plan {drawn['plan']}: expected "
                    f"{wanted:.6g} s, got {short(got)}.{_explain_prediction(got, drawn)}",
                    rank,
                )
                break


def _seconds(network: Values, plan: Plan) -> float:
    return step_seconds(
        plan, network["sizes"], network["backward_s"], network["forward_s"], all_reduce_of(network)
    )


def _explain_prediction(got: Any, drawn: Values) -> str:
    compute = drawn["forward_s"] + sum(drawn["backward_s"])
    reduce_s = [all_reduce_of(drawn)(sum(drawn["sizes"][i] for i in b)) for b in drawn["plan"]]
    ready = drawn["forward_s"] + np.cumsum(drawn["backward_s"][::-1])[::-1]
    alone = [float(ready[b].max()) + s for b, s in zip(drawn["plan"], reduce_s, strict=True)]
    if is_close(got, compute + sum(reduce_s)):
        return " That is without overlap: a bucket travels while backward goes on."
    if is_close(got, max(compute, *alone)):
        return " The network carries one bucket at a time."
    if hint := unit_hint(got, _seconds(drawn, drawn["plan"])):
        return f" {hint}"
    value = as_number(got)
    if value is None:
        return " Is a `return` missing?"
    if value < compute:
        return " A step is never shorter than its computation."
    if left_out := sorted(set(range(len(drawn["sizes"]))) - {i for b in drawn["plan"] for i in b}):
        return (
            f" Gradients {', '.join(map(str, left_out))} are in no bucket: they do not travel, and "
            "backward takes its time for them all the same."
        )
    return " A bucket starts when its last gradient is there and the one before it has arrived."


# --- tune_plan -----------------------------------------------------------------------------------


@per_rank
def draw_tuning(rng: np.random.Generator) -> Values:
    """Networks with high latency and huge gradients, or low bandwidth and small gradients.

    On one of them the last gradient is as large as all others together, and the best cap is far
    below its size. On another, the best plan has many buckets, but not one for each gradient. The
    first one's gradients come again in a network with high latency.
    """
    cases: list[Any] = []
    for number in range(5):
        # The last network has more gradients than there are measurements.
        count = int(rng.integers(28, 36)) if number < 4 else int(rng.integers(90, 120))
        if number == 4:
            # One bucket per gradient pays too much latency; an eighth of the bytes ends too late.
            network = draw_network(
                rng, float(rng.uniform(0.3, 0.35)), float(rng.uniform(0.82, 0.86)), count
            )
            network["forward_s"] /= 5
            factor = 1
        elif number % 2:
            network = draw_network(
                rng, float(rng.uniform(2.7, 3.0)), float(rng.uniform(0.06, 0.1)), count
            )
            factor = 2**16  # each gradient exceeds any usual cap
        else:
            network = draw_network(
                rng, float(rng.uniform(0.01, 0.03)), float(rng.uniform(0.9, 0.95)), count
            )
            factor = 1  # all of them together are below any usual cap
        network["sizes"] = [size * factor for size in network["sizes"]]
        network["s_per_byte"] /= factor
        if number == 2:
            network["sizes"][-1] = sum(network["sizes"][:-1])
            network["s_per_byte"] /= 2
        cases.append(network)
    scale, sizes = sum(cases[0]["backward_s"]), cases[0]["sizes"]
    slow = {"fixed_s": 2.85 * scale / len(sizes), "s_per_byte": 0.08 * scale / sum(sizes)}
    cases.append(cases[0] | slow)
    return {"cases": [cases[i] for i in rng.permutation(len(cases))]}


def observe_tuning(tune_plan: Any, inputs: Values, context: Context) -> Values:
    """The plan that the function finds for each network, and how many plans it measured."""
    plans, counts = [], []
    for network in inputs["cases"]:
        measured: list[Plan] = []

        def measure(plan: Any, network: Values = network, measured: list = measured) -> float:
            measured.append(read_plan(plan, "the plan to measure"))
            count = len(network["sizes"])
            if any(not b or max(b) >= count or min(b) < -count for b in measured[-1]):
                raise ValueError(
                    f"measure(plan) got the plan {measured[-1]} for {count} gradients: no bucket "
                    f"may be empty, and the indices are 0 to {count - 1}"
                )
            return _seconds(network, measured[-1])

        with naming(f"tune_plan(sizes, measure) with {len(network['sizes'])} gradients"):
            plans.append(read_plan(tune_plan(list(network["sizes"]), measure), "tune_plan"))
        counts.append(len(measured))
    return {"plans": plans, "counts": counts}


def judge_tuning(case: Case) -> Iterator[Finding]:
    """The plan is about as good as the best equal caps, which are at least 90 % efficient.

    Any search may find the plan, by caps or by borders between buckets.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, network in enumerate(inputs["cases"]):
            got = item_of(answer.get("plans"), number)
            if problem := _tuning_problem(got, item_of(answer.get("counts"), number), network):
                yield Finding(problem, rank)
                break


def _tuning_problem(plan: Any, count: Any, network: Values) -> str | None:
    sizes = network["sizes"]
    buckets = _sorted_buckets(plan)
    if buckets is None or any(not b for b in buckets):
        return "expected a plan: a list of buckets, each a list of indices."
    if sorted(i for b in buckets for i in b) != list(range(len(sizes))):
        return "each gradient belongs to exactly one bucket of the plan."
    if not isinstance(count, int) or count > MAX_MEASUREMENTS:
        return f"{count!r} plans were measured; at most {MAX_MEASUREMENTS} are paid for."

    def measure(plan: Plan) -> float:
        return _seconds(network, plan)

    best_s, got_s = measure(best_plan(sizes, measure)), measure(buckets)
    compute = network["forward_s"] + sum(network["backward_s"])
    efficiency = compute / got_s
    if got_s <= SLACK * best_s:
        return None
    return (
        f"{len(sizes)} gradients, {sum(sizes) / 1e6:.3g} MB: the plan has {len(plan)} buckets and "
        f"an efficiency of {efficiency:.3f}; {compute / best_s:.3f} is possible. One bucket for "
        f"all would have {compute / measure(fill_buckets(sizes, float(sum(sizes)))):.3f}, one for "
        f"each {compute / measure(fill_buckets(sizes, 0.0)):.3f}. Try many caps, from the "
        "smallest gradient to the sum of all, and measure each."
    )
