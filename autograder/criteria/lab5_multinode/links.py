"""Criteria for task 6 of lab 5: measuring a link.

A real clock would judge the machine, not the student. So the student's function gets a simulated
exchange and a simulated clock. Only the exchange moves the clock, by the time that a secret link
would take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autograder.criteria.common.answers import is_floats, item_of, read, read_number, told
from autograder.criteria.criterion import Case, Context, Finding, Values, differs, per_rank

RUN = ("kind", "num_bytes", "seconds", "num_ranks")  # the arguments of bus_bandwidth
SIZES = (4_000, 64_000, 1_000_000, 16_000_000)
KINDS = {
    "all_reduce": "2(n-1)/n: every byte goes around the ring twice, but for one n-th",
    "all_gather": "(n-1)/n: a rank has its own part already",
    "reduce_scatter": "(n-1)/n: a rank keeps its own part",
    "broadcast": "1: every byte goes down the chain once",
}


@per_rank
def draw_measure(rng: np.random.Generator) -> Values:
    """Two links per rank: one with slow warm-up calls; one without, and with 6 or 8 repeats."""
    links = [_draw_link(rng, (3, 4), (7, 9)), _draw_link(rng, (0,), (6, 8))]  # no defaults
    return {"links": links}


def _draw_link(rng: np.random.Generator, warmup: Sequence[int], repeats: Sequence[int]) -> Values:
    """A link, the sizes in some order, and per size the factors by which its calls take longer.

    The factors' median is 1. Of an odd number of calls, just under half are disturbed. Of an even
    number, the two in the middle have the factors 0.75 and 1.25.
    """
    count = int(rng.choice(repeats))
    factors = []
    for _ in SIZES:
        calls = np.ones(count)
        calls[: count // 2] = 7.5
        if count % 2 == 0:
            calls[count // 2 - 1] = 1.25
            calls[count // 2] = 0.75
            calls[count // 2 + 1 :] = 0.5
        factors.append(rng.permutation(calls).tolist())
    return {
        "warmup": int(rng.choice(warmup)),
        "repeats": count,
        "sizes": [SIZES[i] for i in rng.permutation(len(SIZES))],
        "latency_s": float(rng.uniform(1e-5, 9e-4)),
        "bandwidth_bytes_per_s": float(rng.uniform(2e8, 3e9)),
        "clock_began_s": float(rng.uniform(10, 1000)),
        "factors": factors,
        "cold_s": float(rng.uniform(0.5, 2.0)),
    }


class _Link:
    """A simulated link: an exchange, and a clock that only the exchange moves."""

    def __init__(self, inputs: Values) -> None:
        self.inputs, self.now_s = inputs, inputs["clock_began_s"]
        self.calls: dict[int, int] = {}

    def clock(self) -> float:
        return self.now_s

    def exchange(self, num_bytes: int) -> None:
        if num_bytes not in SIZES:
            raise ValueError(f"exchange({num_bytes!r}): expected one of the given sizes, in bytes")
        call = self.calls.get(num_bytes, 0)
        self.calls[num_bytes] = call + 1
        taken_s = self.inputs["latency_s"] + num_bytes / self.inputs["bandwidth_bytes_per_s"]
        warmup = self.inputs["warmup"]
        if call < warmup:
            taken_s += self.inputs["cold_s"]
        else:
            factors = self.inputs["factors"][SIZES.index(num_bytes)]
            taken_s *= factors[min(call - warmup, len(factors) - 1)]
        self.now_s += taken_s


def observe_measure(measure_link: Any, inputs: Values, context: Context) -> Values:
    """The latency and bandwidth that the function measures, and how often it called, per link."""
    answer: Values = {"calls": []}
    for number, given in enumerate(inputs["links"]):
        link = _Link(given)
        found = measure_link(
            link.exchange,
            list(given["sizes"]),
            clock=link.clock,
            warmup=given["warmup"],
            repeats=given["repeats"],
        )
        pair = read(found, _pair, "measure_link", "(latency_s, bandwidth_bytes_per_s)")
        answer[f"found/{number}"] = np.array([read_number(v, name) for name, v in pair])
        answer["calls"].append([link.calls.get(size, 0) for size in SIZES])
    return answer


def _pair(found: Any) -> list[tuple[str, Any]]:
    return list(zip(("latency_s", "bandwidth_bytes_per_s"), found, strict=True))


def judge_measure(case: Case) -> Iterator[Finding]:
    """Latency and bandwidth of the link, within one in a thousand; as many calls as asked for.

    One size may be measured after another, or all of them in turn.
    """
    for rank, answer in enumerate(case.answers):
        for number, given in enumerate(case.inputs[rank]["links"]):
            got = answer.get(f"found/{number}")
            right = np.array([given["latency_s"], given["bandwidth_bytes_per_s"]])
            hint = "" if not isinstance(got, np.ndarray) else _reason(got, right, given)
            where = f"warmup={given['warmup']}, repeats={given['repeats']}"
            what = f"{where}: [latency_s, bandwidth_bytes_per_s]"
            calls = item_of(told(answer, "calls"), number)
            count = given["warmup"] + given["repeats"]
            if calls != [count] * len(SIZES):
                why = f"expected {count} calls of exchange for each size, got {calls}."
                yield Finding(f"{where}: {why}", rank)
                break
            if wrong := differs(rank, what, got, right, rtol=1e-3, atol=0.0, hint=hint):
                yield wrong
                break


def _reason(got: np.ndarray, right: np.ndarray, given: Values) -> str:
    if not is_floats(got, (2,)) or not np.isfinite(got).all():
        return ""
    for factor, what in (
        (8, "bits"),
        (1e-3, "kilobytes"),
        (1e-6, "megabytes"),
        (1e-9, "gigabytes"),
    ):
        if abs(got[1] / right[1] / factor - 1) < 1e-3:
            return f"The bandwidth is in {what} per second; bytes per second were asked for."
    if abs(got[1] * right[1] - 1) < 1e-3:
        return "That is the slope, seconds per byte; the bandwidth is bytes per second."
    for factor, what in ((1e3, "milliseconds"), (1e6, "microseconds")):
        if abs(got[0] / right[0] / factor - 1) < 1e-3:
            return f"The latency is in {what}; seconds were asked for."
    factor = got[0] / right[0]
    if abs(got[1] * factor / right[1] - 1) < 1e-3:
        if abs(factor - 7.5) < 0.01:
            return "So they are if the warm-up calls are timed, too."
        if min(abs(factor - 1.25), abs(factor - 0.75)) < 0.01:
            return "Of an even number of repeats the median is the mean of the two in the middle."
    seconds = [right[0] + size / right[1] for size in given["sizes"]]
    slope, first = np.polyfit(np.array(sorted(given["sizes"]), float), seconds, 1)
    if np.allclose(got, [first, 1 / slope], rtol=1e-3):
        return "So they are if the sizes are sorted and the seconds are not."
    if got[0] > given["cold_s"] / 20:  # more than 25 times any drawn latency
        return "Are the warm-up calls timed? The first ones open connections."
    return (
        "Time each call, take the median of a size's repeats (one disturbed call must not count), "
        "and lay a straight line seconds = latency + bytes / bandwidth through the sizes."
    )


# --- link_bus ------------------------------------------------------------------------------------


@per_rank
def draw_bus(rng: np.random.Generator) -> Values:
    """Per rank one measured run of each collective, and one run on a single rank."""
    runs = [
        {
            "kind": kind,
            "num_bytes": int(rng.integers(10**6, 10**9)),
            "seconds": float(rng.uniform(1e-3, 2.0)),
            "num_ranks": int(rng.integers(3, 65)),
        }
        for kind in KINDS
    ]
    runs.append(dict(runs[0], num_ranks=1))
    return {"runs": runs}


def observe_bus(bus_bandwidth: Any, inputs: Values, context: Context) -> Values:
    """The bus bandwidth of every run."""
    found = [
        read_number(bus_bandwidth(*(r[key] for key in RUN)), f"bus_bandwidth({r['kind']!r}, …)")
        for r in inputs["runs"]
    ]
    return {"found": np.array(found)}


def bus_gbit_per_s(run: Values) -> float:
    """The bus bandwidth of a run: what each link must have carried, in Gbit/s."""
    n = run["num_ranks"]
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(run["kind"], (n - 1) / n)
    return factor * run["num_bytes"] * 8 / run["seconds"] / 1e9


def judge_bus(case: Case) -> Iterator[Finding]:
    """The bus bandwidth is in Gbit/s, with the factor of each collective."""
    for rank, answer in enumerate(case.answers):
        runs, got = case.inputs[rank]["runs"], answer.get("found")
        if not is_floats(got, (len(runs),)):
            yield Finding("there is no answer for every collective.", rank)
            continue
        for run, value in zip(runs, got, strict=True):
            right = np.array(bus_gbit_per_s(run))
            what = f"{run['kind']} of {run['num_bytes']} bytes on {run['num_ranks']} ranks, Gbit/s"
            hint = f"The factor is {KINDS[run['kind']]}."
            for factor, reason in (
                (1 / 8, "That is in gigabytes; network cards are sold in gigabits."),
                (1e9 / 2**30, "A gigabit is 1e9 bits."),
                (1e3, "That is in megabits per second."),
                (1e9, "That is in bits per second."),
            ):
                if abs(value - right * factor) < 1e-9 * abs(right):
                    hint = reason
            if wrong := differs(
                rank, what, np.asarray(value), right, rtol=1e-6, atol=1e-12, hint=hint
            ):
                yield wrong
                break
