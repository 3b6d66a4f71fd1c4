"""Criteria for measuring the bytes and the seconds of a training step, on a device that queues.

No real time is measured. The device and the clock are simulated with numbers that the referee drew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described, is_close, item_of, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

KEYS = ("parameters", "gradients", "optimizer", "saved")
PRECISIONS = ("float32", "autocast", "bfloat16")
LR = 0.1  # large enough that a step changes bf16 parameters, too


# --- memory_report -------------------------------------------------------------------------------


def draw_memory(draw: Draw) -> list[Values]:
    """Networks of private sizes, in three precisions, with and without a frozen layer."""
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        cases = []
        # Each kind of optimizer comes in each draw, so that no report is right by luck.
        optimizers = rng.permutation(["AdamW", "AdamW", "SGD", "plain SGD"])
        for number, precision in enumerate((*PRECISIONS, "autocast")):
            cases.append(
                {
                    "precision": precision,
                    "sizes": [int(rng.integers(4, 24)) * 2 for _ in range(4)],
                    "batch": int(rng.integers(10, 40)),
                    "frozen": bool(number == 3),
                    "optimizer": str(optimizers[number]),
                }
            )
        inputs.append({"cases": [cases[i] for i in rng.permutation(len(cases))]})
    return inputs


def observe_memory(memory_report: Any, inputs: Values, context: Context) -> Values:
    """The report on each case, and whether a correct step was made in every case."""
    reports, counts, stepped = [], [], True
    for case in inputs["cases"]:
        a, b, c, d = case["sizes"]
        layers = (nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, d))
        model = nn.Sequential(*layers)
        model.register_buffer("counts", torch.zeros(a))  # a buffer is no parameter
        model = model.to(context.device)
        model[0].requires_grad_(not case["frozen"])
        x = torch.randn(case["batch"], a, device=context.device)
        y = torch.randn(case["batch"], d, device=context.device)
        if case["precision"] == "bfloat16":
            model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
        trained = [p for p in model.parameters() if p.requires_grad]
        if case["optimizer"] == "AdamW":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=LR, foreach=False)
        else:
            momentum = 0.9 if case["optimizer"] == "SGD" else 0.0
            optimizer = torch.optim.SGD(trained, lr=LR, momentum=momentum)
        calls = {"compute_loss": 0, "optimizer.step": 0}
        optimizer.register_step_post_hook(lambda *_, of=calls: _count(of, "optimizer.step"))
        before = [p.detach().clone() for p in trained]
        for p in trained:  # stale gradients: a step with them gives nan
            p.grad = torch.full_like(p, torch.nan)
        autocast = torch.autocast(
            context.device.type, dtype=torch.bfloat16, enabled=case["precision"] == "autocast"
        )

        def compute_loss(
            model: nn.Module = model,
            x: torch.Tensor = x,
            y: torch.Tensor = y,
            on: Any = autocast,
            of: dict[str, int] = calls,
        ) -> torch.Tensor:
            _count(of, "compute_loss")
            with on:
                return oracle.mse(model(x).float(), y)

        report = memory_report(model, optimizer, compute_loss)
        if isinstance(report, dict):
            reports.append({key: described_integer(report.get(key)) for key in KEYS})
        else:
            reports.append(described(report))
        counts.append(calls)
        stepped &= all(bool(torch.isfinite(p).all()) for p in trained)
        stepped &= not all(torch.equal(p, b) for p, b in zip(trained, before, strict=True))
    return {"reports": reports, "calls": counts, "stepped": stepped}


def _count(calls: dict[str, int], what: str) -> None:
    calls[what] += 1


def described_integer(value: Any) -> Any:
    """An int as it is, anything else in words."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_integer else f"{described(value)}"


def expected_bytes(case: Values) -> dict[str, tuple[int, int]]:
    """Smallest and largest accepted bytes; AdamW's step counters may be counted or not."""
    a, b, c, d = case["sizes"]
    batch, frozen = case["batch"], case["frozen"]
    width = 2 if case["precision"] == "bfloat16" else 4
    numel = (0 if frozen else a * b + b) + b * c + c + c * d + d
    adam = case["optimizer"] == "AdamW"
    state = numel * width * {"AdamW": 2, "SGD": 1, "plain SGD": 0}[case["optimizer"]]
    # Each linear layer saves its input, and its weight if its input needs a gradient. A saved
    # parameter does not count as "saved", but autocast's 16-bit copy of a parameter does. ReLU and
    # tanh save their output, which is the input of the next layer and so counts once.
    activations = batch * (b + c + (0 if frozen else a))
    copies = c * d + (0 if frozen else b * c)
    saved = batch * d * 4  # the difference that the loss squares, in float32
    saved += activations * (4 if case["precision"] == "float32" else 2)
    saved += 2 * copies if case["precision"] == "autocast" else 0
    everything = (a * b + b + b * c + c + c * d + d) * width
    counters = 8 * (4 if frozen else 6) if adam else 0
    return {
        "parameters": (everything, everything),
        "gradients": (numel * width, numel * width),
        "optimizer": (state, state + counters),
        "saved": (saved, saved),
    }


_HINTS = {
    "parameters": "numel × element_size of every parameter, frozen ones as well.",
    "gradients": "Those that there are after backward; a frozen parameter has none.",
    "optimizer": "The tensors in optimizer.state, after a step.",
    "saved": "What autograd packs during compute_loss(): each storage once, and none that "
    "belongs to a parameter.",
}


def judge_memory(case: Case) -> list[Finding]:
    """The reported bytes follow from the sizes, and the optimizer made a correct step."""
    findings: list[Finding] = []
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        reports = told(answer, "reports")
        calls = [item_of(told(answer, "calls"), n) for n in range(len(inputs["cases"]))]
        if wrong := [c for c in calls if c != {"compute_loss": 1, "optimizer.step": 1}]:
            findings.append(
                Finding(
                    f"expected one call each of compute_loss and optimizer.step: {wrong[0]}.", rank
                )
            )
            continue
        if answer.get("stepped") is not True:
            findings.append(
                Finding(
                    "the parameters have not made one step with the gradients of compute_loss() "
                    "alone: were older ones cleared?",
                    rank,
                )
            )
            continue
        for number, net in enumerate(inputs["cases"]):
            report = item_of(reports, number)
            if not isinstance(report, dict):
                findings.append(Finding(f"expected a dict of bytes, got {report}.", rank))
                break
            for key, (least, most) in expected_bytes(net).items():
                got = report.get(key)
                if not isinstance(got, int) or not least <= got <= most:
                    frozen = ", first layer frozen" if net["frozen"] else ""
                    findings.append(
                        Finding(
                            f"{net['precision']}, layers {net['sizes']}, batch {net['batch']}, "
                            f"{net['optimizer']}{frozen}: expected {least} bytes of {key}, got "
                            f"{got}. {_HINTS[key]}",
                            rank,
                        )
                    )
            if findings and findings[-1].rank == rank:
                break
    return findings


# --- time_step -----------------------------------------------------------------------------------

LAUNCH_S = 1e-4  # the time that the program needs to queue a step


class QueueingDevice:
    """A simulated device that queues each step and executes it later; all times are drawn."""

    def __init__(self, work_s: np.ndarray) -> None:
        self.work_s, self.calls = work_s, 0
        self.now = self.ready = 100.0

    def step(self) -> None:
        """Queues one step's work."""
        self.now += LAUNCH_S
        work = float(self.work_s[min(self.calls, len(self.work_s) - 1)])
        self.ready = max(self.ready, self.now) + work
        self.calls += 1

    def synchronize(self) -> None:
        """Waits until the queue is empty."""
        self.now = max(self.now, self.ready)

    def clock(self) -> float:
        """The simulated time in seconds."""
        return self.now


def draw_timing(draw: Draw) -> list[Values]:
    """Slow warm-up steps, an outlier per rank, and a slowest rank: the first, middle, or last.

    The outlier of every other rank is in a step in which the slowest is faster than its own median,
    so that the median of each step's slowest is not the slowest median.
    """
    rng, n = draw.shared("settings"), draw.world_size
    settings = [
        {"warmup": int(rng.integers(2, 5)), "repeats": int(rng.integers(3, 6)) * 2 + 1},
        {"warmup": int(rng.integers(2, 5)), "repeats": 1},
        {"warmup": 0, "repeats": 7},
    ]
    slowest = [int(r) for r in rng.permutation([0, n // 2, n - 1])]
    inputs: list[Values] = [{"settings": settings} for _ in range(n)]
    for number, setting in enumerate(settings):
        warmup, repeats, slow = setting["warmup"], setting["repeats"], slowest[number]
        works = [draw.private(r).uniform(2e-3, 3e-3, warmup + repeats) for r in range(n)]
        works[slow] += 2e-3
        fast = warmup + np.argsort(works[slow][warmup:])[: repeats // 2]
        for rank, work in enumerate(works):
            work[:warmup] *= 40
            if repeats > 1:
                places = np.arange(warmup, warmup + repeats) if rank == slow else fast
                work[int(rng.choice(places))] *= 30
            inputs[rank][f"work/{number}"] = work
    return inputs


def observe_timing(time_step: Any, inputs: Values, context: Context) -> Values:
    """The seconds that the function measures in each case, and how often it called the step."""
    seconds, calls = [], []
    for number, setting in enumerate(inputs["settings"]):
        machine = QueueingDevice(inputs[f"work/{number}"])
        seconds.append(
            described(
                time_step(
                    machine.step,
                    machine.synchronize,
                    context.device,
                    warmup=setting["warmup"],
                    repeats=setting["repeats"],
                    clock=machine.clock,
                )
            )
        )
        calls.append(machine.calls)
    return {"seconds": seconds, "calls": calls}


def judge_timing(case: Case) -> Iterator[Finding]:
    """The median of the timed steps on the slowest rank, with an empty queue around each step."""
    for number, setting in enumerate(case.inputs[0]["settings"]):
        warmup, repeats = setting["warmup"], setting["repeats"]
        per_rank = [inputs[f"work/{number}"] for inputs in case.inputs]
        medians = [LAUNCH_S + float(np.median(work[warmup:])) for work in per_rank]
        what = f"warmup={warmup}, repeats={repeats}"
        for rank, answer in enumerate(case.answers):
            calls, seconds = answer.get("calls"), answer.get("seconds")
            got = seconds[number] if isinstance(seconds, list) and number < len(seconds) else None
            if not isinstance(calls, list) or calls[number : number + 1] != [warmup + repeats]:
                yield Finding(
                    f"{what}: step() was called {calls} times in the cases; expected "
                    f"{warmup + repeats} times in case {number}.",
                    rank,
                )
                break
            if not is_close(got, max(medians), rtol=0.0, atol=1e-9):
                hint = _explain_timing(got, per_rank[rank], medians[rank], warmup, max(medians))
                yield Finding(
                    f"{what}: expected {max(medians) * 1e3:.4f} ms, got "
                    f"{_milliseconds(got)}.{hint}",
                    rank,
                )
                break


def _milliseconds(got: Any) -> str:
    return f"{got * 1e3:.4f} ms" if isinstance(got, float) else repr(got)


def _explain_timing(got: Any, work: np.ndarray, median: float, warmup: int, slowest: float) -> str:
    if not isinstance(got, float):
        return ""
    for value, reason in (
        (median, "That is this rank's own median: all wait for the slowest rank."),
        (
            LAUNCH_S,
            "That is how long it takes to queue a step: synchronize() before the second "
            "look at the clock.",
        ),
        (LAUNCH_S + float(work[warmup:].mean()), "That is the mean, which one outlier decides."),
        (LAUNCH_S + float(np.median(work)), "The warm-up steps were timed as well."),
        (1e3 * slowest, "That is in milliseconds; seconds are asked for."),
    ):
        if abs(got - value) <= 1e-9 * max(1.0, value):
            return " " + reason
    return " Is the queue empty when the clock is read first?"
