"""Criteria for scaling figures, and for the cost of communication in a step.

No real time is measured: seconds are drawn, and the simulated machine changes its speed during the
measurement, as real machines do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from autograder.criteria.common.answers import (
    as_number,
    described_numbers,
    described_scalar,
    is_close,
    item_of,
    naming,
    plain,
    read,
    unit_hint,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer, per_rank
from autograder.criteria.lab6_profiling.spans import is_same

MODES = ("weak", "strong")


# --- scaling -------------------------------------------------------------------------------------


@per_rank
def draw_scaling(rng: np.random.Generator) -> Values:
    """Seconds per step for several numbers of ranks; in some cases the smallest is above one."""
    cases: list[Any] = []
    for number, mode in enumerate(MODES * 2):
        first = 1 if number < 2 else int(rng.integers(2, 5))
        sizes = [first * 2**i for i in range(4)]
        seconds = float(rng.uniform(0.5, 3.0))
        times = []
        for size in sizes:
            ideal = seconds / (size / first if mode == "strong" else 1)
            times.append(ideal * (1 if size == first else float(rng.uniform(1.05, 1.6))))
        times[1] /= 2  # more than twice as fast: the smaller parts fit a cache
        order = rng.permutation(len(sizes)).tolist()
        cases.append(
            {
                "mode": mode,
                "sizes": [sizes[i] for i in order],
                "seconds": [times[i] for i in order],
            }
        )
    return {"cases": cases}


def observe_scaling(scaling: Any, inputs: Values, context: Context) -> Values:
    """(number of ranks, speed-up, efficiency) for every size of every case."""
    rows = []
    for case in inputs["cases"]:
        times = dict(zip(case["sizes"], case["seconds"], strict=True))
        with naming(f"scaling({times}, {case['mode']!r})"):
            found = scaling(times, case["mode"])
            items = read(found, _by_ranks, "scaling", "a dict whose keys are numbers of ranks")
            rows.append([[n, *described_numbers(values)] for n, values in items])
    return {"rows": rows}


def _by_ranks(found: Any) -> list[tuple[int, Any]]:
    return [(integer(n, "a number of ranks"), found[n]) for n in sorted(found)]


def judge_scaling(case: Case) -> Iterator[Finding]:
    """Efficiency is relative to the smallest number of ranks; speed-up = ranks × efficiency."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, drawn in enumerate(inputs["cases"]):
            problem = _scaling_problem(item_of(answer.get("rows"), number), drawn)
            if problem:
                yield Finding(problem, rank)
                break


def _by_size(rows: Any) -> dict[int, list[Any]]:
    """Number of ranks -> the two values beside it, of those rows that can be read."""
    return {
        row[0]: row[1:]
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, list) and len(row) == 3 and isinstance(row[0], int)
    }


def _scaling_problem(rows: Any, drawn: Values) -> str | None:
    times, mode = dict(zip(drawn["sizes"], drawn["seconds"], strict=True)), drawn["mode"]
    base, got = min(times), _by_size(rows)
    for size in sorted(times):
        efficiency = times[base] / times[size]
        if mode == "strong":
            efficiency *= base / size
        pair = got.get(size, [None, None])
        for what, value, wanted in (
            ("efficiency", pair[1], efficiency),
            ("speed-up", pair[0], size * efficiency),
        ):
            if not is_close(value, wanted):
                return (
                    f'"{mode}", {_ranks(base)}: {times[base]:.4f} s, {_ranks(size)}: '
                    f"{times[size]:.4f} s: expected {what} {wanted:.4f}, got {value!r}."
                    f"{_explain(value, what, mode, base, size, times)}"
                )
    return None


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _explain(
    value: Any, what: str, mode: str, base: int, size: int, times: dict[int, float]
) -> str:
    """What the value is, if it is a known wrong one."""
    weak = times[base] / times[size] * (size if what == "speed-up" else 1)
    strong = weak * base / size
    right, other = (weak, strong) if mode == "weak" else (strong, weak)
    ideal = size if what == "speed-up" else 1
    if size != base and is_close(value, other):
        return f' That is the figure of "{MODES[mode == "weak"]}" scaling.'
    if base > 1 and is_close(value, right / base):
        return f" Not one rank but {base} are the base here."
    if right > ideal and is_close(value, ideal):
        return " It can be more than that, where smaller parts fit a cache: leave it as it is."
    return ""


# --- scaling_report ------------------------------------------------------------------------------


@per_rank
def draw_report(rng: np.random.Generator) -> Values:
    """Logs of weak and strong scaling, in any order, on a machine that is slow in some rounds.

    In strong scaling the ranks cannot divide the batch evenly, so together they process fewer rows.
    The fewest ranks are one in some logs and two in others. Of the last two rounds, one lacks the
    run with the most ranks and the other one that with the fewest.
    """
    logs = []
    for first in (1, 2):
        for is_strong in (False, True):
            sizes = [first, 2 * first, 4 * first]
            batch = int(rng.integers(3, 9))
            if is_strong:
                batch = 4 * batch + int(rng.integers(1, 4))
            alone, rounds = float(rng.uniform(0.5, 2.0)), int(rng.integers(3, 6)) * 2
            lines = []
            for number in range(rounds):
                for place, size in enumerate(sizes):
                    if (number, place) in ((rounds - 1, 0), (rounds - 2, 2)):
                        continue
                    # The disturbed rounds are few, and slow for all sizes.
                    slow = float(rng.uniform(1, 1.2)) * (6 if number in (0, 2) else 1)
                    seconds = alone * (size / first) ** float(rng.uniform(0.1, 0.4)) * slow
                    seconds /= size / first if is_strong else 1
                    rows = batch * first // size if is_strong else batch
                    lines.append([number, size, rows, seconds])
            order = rng.permutation(len(lines)).tolist()
            logs.append([lines[i] for i in order])
    return {"logs": logs}


_LINE = ("round", "ranks", "batch_per_rank", "seconds")
_REPORTED = ("samples_per_s", "efficiency")


def observe_report(scaling_report: Any, inputs: Values, context: Context) -> Values:
    """(number of ranks, numbers of each kind) for every size of every log."""
    reports = []
    for lines in inputs["logs"]:
        log = [dict(zip(_LINE, line, strict=True)) for line in lines]
        with naming(f"scaling_report(log): of {len(log)} lines, and not all rounds are complete"):
            reports.append(
                read(
                    scaling_report(log),
                    _rows,
                    "scaling_report",
                    f"a dict: number of ranks -> dict with the keys {' and '.join(_REPORTED)}",
                )
            )
    return {"reports": reports}


def _rows(report: Any) -> list[list[Any]]:
    return [
        [n, *(described_numbers(found[name]) for name in _REPORTED)]
        for n, found in _by_ranks(report)
    ]


def judge_report(case: Case) -> Iterator[Finding]:
    """The report follows from the log alone: no real time matters."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, lines in enumerate(inputs["logs"]):
            problem = _report_problem(item_of(answer.get("reports"), number), lines)
            if problem:
                yield Finding(f"{problem} The log has {len(lines)} lines.", rank)
                break


def _report_problem(rows: Any, lines: Sequence[Sequence[Any]]) -> str:
    rate = {(i, n): n * batch / seconds for i, n, batch, seconds in lines}
    sizes = sorted({n for _, n in rate})
    got = _by_size(rows)
    if sorted(got) != sizes:
        return f"expected rows for {sizes} ranks, got {sorted(got)}."
    for size in sizes:
        rates = {i: value for (i, n), value in rate.items() if n == size}
        alone = {i: value / sizes[0] for (i, n), value in rate.items() if n == sizes[0]}
        shares = [value / size / alone[i] for i, value in rates.items() if i in alone]
        for name, values, found in zip(
            _REPORTED, ([*rates.values()], shares), got[size], strict=True
        ):
            wanted = (min(values), float(np.median(values)), max(values))
            is_three = isinstance(found, list) and len(found) == 3
            if not (is_three and all(map(is_close, found, wanted))):
                shown = ", ".join(f"{value:.4f}" for value in wanted)
                return (
                    f"{_ranks(size)}, {name}: expected ({shown}), got "
                    f"{_shown(found)}.{_why(found, wanted, name, size, sizes[0])}"
                )
    return ""


def _shown(found: Any) -> str:
    if not isinstance(found, list):
        return str(found)[:80]
    return (
        f"({', '.join(f'{v:.4f}' if as_number(v) is not None else str(v)[:40] for v in found[:5])})"
    )


def _why(found: Any, wanted: Sequence[float], name: str, size: int, base: int) -> str:
    """What the numbers are, if they are known wrong ones."""
    middle = found[1] if isinstance(found, list) and len(found) == 3 else None
    if size > 1 and name == "samples_per_s" and is_close(middle, wanted[1] / size):
        return " That is of one rank, not of all together."
    if size > base and name == "efficiency" and is_close(middle, wanted[1] * size / base):
        return " That is the speed-up."
    if base > 1 and name == "efficiency" and is_close(middle, wanted[1] / base):
        return f" The fewest ranks are {base}, and their efficiency is 1."
    if name == "efficiency":
        return (
            " Is each ratio one of samples per second (all ranks together have not always the same "
            "number), taken within a round, and only of rounds that have both?"
        )
    if hint := unit_hint(middle, wanted[1]):
        return f" {hint}"
    return " Is it over all rounds of this number of ranks, also over those that lack others?"


# --- communication_overhead ----------------------------------------------------------------------


class DriftingMachine:
    """A simulated device that queues steps with and without communication, and its clock.

    Args:
        speed: per round, the factor by which both steps take longer.
        noise: per round, the further factor by which the step with communication takes longer.
    """

    def __init__(
        self, with_s: float, without_s: float, speed: np.ndarray, noise: np.ndarray
    ) -> None:
        self.seconds = {True: with_s, False: without_s}
        self.speed, self.noise = speed, noise
        self.counts = {True: 0, False: 0}
        self.now = self.ready = 2e6  # as after three weeks: float32 would not hold milliseconds

    def run(self, with_communication: bool) -> None:
        """Queues a step."""
        index = min(sum(self.counts.values()) // 2, len(self.speed) - 1)
        turn = min(self.counts[True], len(self.noise) - 1)
        self.counts[with_communication] += 1
        self.now += 1e-5
        speed = float(self.speed[index])
        if with_communication:
            speed *= float(self.noise[turn])
        work = self.seconds[with_communication] * speed - 1e-5
        self.ready = max(self.ready, self.now) + work

    def synchronize(self) -> None:
        """Waits until the queue is empty."""
        self.now = max(self.now, self.ready)

    def clock(self) -> float:
        """The simulated time in seconds."""
        return self.now

    def slow(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """The collective, made to take as long as a step."""

        def waits(*args: Any, **kwargs: Any) -> Any:
            self.now += self.seconds[True]
            return collective(*args, **kwargs)

        return waits


BUSY_S = 0.5  # when the measurement begins, the device is still busy for so long
# Collectives that may find the slowest rank; the measured times must not contain theirs.
_MAXIMA = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")


def draw_overhead(draw: Draw) -> list[Values]:
    """The slowest rank with communication is not the slowest one without; the machine drifts.

    The number of rounds is even: the median is the mean of the two in the middle.
    """
    rng, world_size = draw.shared(), draw.world_size
    rounds = int(rng.integers(4, 8)) * 2
    speed = np.linspace(1.0, 3.0, rounds) * rng.uniform(0.95, 1.05, rounds)
    speed[int(rng.integers(rounds))] *= 8
    noise = rng.uniform(1.0, 1.3, rounds)
    noise[int(rng.integers(1, rounds))] *= 5  # far from the median, so that a mean is wrong
    noise[0] = 0.9  # the smallest share, unless BUSY_S is counted as part of the step
    faster = rng.uniform(0.3, 0.39, rounds)  # the step without communication is slower
    slow_alone, slow_with = rng.permutation(max(2, world_size)).tolist()[:2]
    inputs = []
    for rank in range(world_size):
        own = draw.private(rank)
        without = float(own.uniform(0.02, 0.03)) + 0.01 * (rank == slow_alone)
        more = float(own.uniform(0.005, 0.01)) + 0.03 * (rank == slow_with)
        inputs.append(
            {
                "rounds": rounds,
                "speed": speed,
                "noises": [noise.tolist(), faster.tolist()],
                "without_s": without,
                "with_s": without + more,
            }
        )
    return inputs


def observe_overhead(communication_overhead: Any, inputs: Values, context: Context) -> Values:
    """The shares that the function returns, and how often it ran each kind of step."""
    answer: Values = {"shares": [], "counts": []}
    for noise in inputs["noises"]:
        machine = DriftingMachine(
            inputs["with_s"], inputs["without_s"], inputs["speed"], np.array(noise)
        )
        machine.ready += BUSY_S  # the device is still busy with something else
        slow: dict[str, Any] = {name: machine.slow(getattr(dist, name)) for name in _MAXIMA}
        clock = f"a clock that reads {machine.now:,.0f} s, where float32 has no milliseconds"
        with mock.patch.multiple(dist, **slow), naming(f"communication_overhead(…) with {clock}"):
            share = communication_overhead(
                partial(machine.run, True),
                partial(machine.run, False),
                machine.synchronize,
                context.device,
                rounds=inputs["rounds"],
                clock=machine.clock,
            )
        answer["shares"].append(described_scalar(share))
        answer["counts"].append([machine.counts[True], machine.counts[False]])
    return answer


def judge_overhead(case: Case) -> Iterator[Finding]:
    """The share is the median over rounds of 1 − without/with, each time of the slowest rank.

    Either kind of step may come first; ranks may compare in each round or once at the end.
    """
    without = max(inputs["without_s"] for inputs in case.inputs)
    with_s = max(inputs["with_s"] for inputs in case.inputs)
    rounds = case.inputs[0]["rounds"]
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, noise in enumerate(case.inputs[0]["noises"]):
            wanted = float(np.median(1 - without / (with_s * np.array(noise))))
            got = item_of(answer.get("shares"), number)
            counts = item_of(answer.get("counts"), number)
            if not is_same(counts, [rounds, rounds]):
                yield Finding(
                    f"rounds={rounds}: expected {rounds} steps of each kind, got {counts!r}.", rank
                )
                break
            if is_close(got, wanted, rtol=1e-4):
                continue
            shown = as_number(got)
            yield Finding(
                f"rounds={rounds}: expected a share of {wanted:.4f}, got "
                f"{got if shown is None else f'{shown:.4f}'}. "
                f"{_overhead_hint(case, rank, number, got)}",
                rank,
            )
            break


def _overhead_hint(case: Case, rank: int, number: int, got: Any) -> str:
    """What the share is, if it is a known wrong one."""
    noise = np.array(case.inputs[0]["noises"][number])
    of_ranks = [float(np.median(1 - i["without_s"] / (i["with_s"] * noise))) for i in case.inputs]
    alike = all(item_of(a.get("shares"), number) == got for a in map(plain, case.answers))
    if is_close(got, of_ranks[rank], rtol=1e-4) and not (alike and len(of_ranks) > 1):
        return "That is this rank's own share: all wait for the slowest rank."
    if is_close(got, max(of_ranks), rtol=1e-4):
        return (
            "That is the largest share of a rank. Take the maximum of each time for itself first, "
            "whichever ranks have them, and then the share."
        )
    if number and is_close(got, 0.0):
        return "A share below 0 says that the difference is noise: leave it as it is."
    hints = _matching(case, number, got)
    others = item_of(case.answers[rank].get("shares"), 1 - number)
    both = [hint for hint in hints if hint in _matching(case, 1 - number, others)]
    for hint in [*both, *hints]:  # `both` first: one share alone may fit by chance
        return hint
    return (
        "Does every round run both kinds and give one ratio? And at each first look at the clock: "
        "is the device idle, and are collectives of your own over? (The clock reads about "
        "2,000,000 s here, where float32 has no milliseconds.)"
    )


def _matching(case: Case, number: int, got: Any) -> list[str]:
    noise = np.array(case.inputs[0]["noises"][number])
    known = _known_shares(case, noise)
    return [hint for value, hint in known if is_close(got, float(value), rtol=1e-4)]


def _known_shares(case: Case, noise: np.ndarray) -> Iterator[tuple[Any, str]]:
    """What known mistakes make of the slowest ranks' times, and what to say of each."""
    speed, rounds = np.asarray(case.inputs[0]["speed"]), case.inputs[0]["rounds"]
    slowest = max(inputs["with_s"] for inputs in case.inputs)
    alone = max(inputs["without_s"] for inputs in case.inputs) * speed  # in each round
    step = slowest * speed * noise
    ratios, first = 1 - alone / step, np.arange(rounds) == 0
    median = np.median(ratios)
    yield 1 - median, "That is without/with."
    yield 1 / (1 - median) - 1, "That is the share of the step without communication."
    yield ratios.mean(), "That is the mean over the rounds: take the median."
    yield ratios[-1], "That is the last round alone: take the median of all."
    lower = np.sort(ratios)[rounds // 2 - 1]
    yield lower, "That is the lower of the two in the middle: the median lies between them."
    for average in (np.median, np.mean):
        whole = 1 - average(alone) / average(step)
        yield whole, "Compare within each round: the median is one of the rounds' shares."
    yield (
        np.median(1 - alone / (step + BUSY_S * first)),
        "In the first round the clock was read while the device was still busy with what came "
        "before: call synchronize() before the first reading, too.",
    )
    for count in (1, 2):
        yield (
            np.median(1 - alone / (step + count * slowest * ~first)),
            "That counts the collective in which you find the slowest rank as part of the next "
            "step: look at the clock again after it, before the step.",
        )
    yield (
        0.0,
        "Both kinds of steps took equally long by your readings. A step only queues its work: is "
        "synchronize() called before the second reading, too?",
    )
