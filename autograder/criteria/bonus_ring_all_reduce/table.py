"""Bonus: a ring all-reduce out of sends and receives. 100 points on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

model, plan, traffic, values = later(
    "autograder.criteria.bonus_ring_all_reduce", "model plan traffic values"
)
charge_plan = Later("autograder.criteria.common.emulated.charge_plan")

_after_plan: dict[str, Any] = {
    "stand_ins": ("chunk_bounds", "ring_steps", "exchange"),
    "relies_on": ("ring_chunks", "ring_plan_reduce", "ring_plan_gather", "ring_exchange"),
}
_after_all_reduce: dict[str, Any] = {
    "stand_ins": (*_after_plan["stand_ins"], "ring_all_reduce"),
    "relies_on": (*_after_plan["relies_on"], "ring_sum", "ring_ops", "ring_small", "ring_bytes"),
}
_after_seconds: dict[str, Any] = {
    "stand_ins": ("ring_seconds", "tree_seconds"),
    "relies_on": ("ring_seconds",),
}
_plan = partial(Criterion, task="Task 2, who sends what", observe=plan.observe_steps, world="none")
_values = partial(
    Criterion,
    task="Task 4, the all-reduce",
    observe=values.observe,
    **_after_plan,
)
_traffic = partial(
    Criterion,
    task="Task 4, the all-reduce",
    plan=charge_plan,
    observe=traffic.observe,
    world="emulated",
    deadline_s=40.0,
    **_after_plan,
)
_model = partial(Criterion, task="Task 5, seconds", draw=model.draw, world="none")

LAB = Lab(
    name="bonus_ring_all_reduce",
    title="Ring all-reduce",
    practice_world_size=3,
    grading_world_size=4,
    gates=(Gate("a-ring", ("ring_bytes", "ring_neighbours", "ring_messages", "ring_time")),),
    withheld={
        "minidist.collectives.ring": "the ring",
        "minidist.collectives.algorithms": "steps of the ring",
        "minidist.collectives.schedule": "chunks",
        "minidist.collectives.transport": "the exchange",
        "minidist.collectives.ddp_hooks": "the hook",
    },
    criteria=(
        Criterion(
            name="ring_chunks", title="chunks that are as even as can be", points=6,
            task="Task 1, chunks", world="none", draw=plan.draw_chunks,
            observe=plan.observe_chunks, judge=plan.judge_chunks,
        ),
        _plan(
            name="ring_plan_reduce", title="N - 1 steps that add up", points=8,
            draw=plan.draw_reduce, judge=plan.judge_reduce,
        ),
        _plan(
            name="ring_plan_gather", title="N - 1 steps that hand round", points=7,
            draw=plan.draw_gather, judge=plan.judge_gather,
        ),
        Criterion(
            name="ring_exchange", title="sends and receives at the same time", points=8,
            task="Task 3, the exchange", draw=values.draw_exchange,
            observe=values.observe_exchange, judge=values.judge_exchange,
        ),
        _values(name="ring_sum", title="the sum over all ranks", points=8, draw=values.draw_sum,
                judge=values.judge_sum),
        _values(name="ring_ops", title="mean and maximum", points=8, draw=values.draw_ops,
                judge=values.judge),
        _values(name="ring_small", title="fewer numbers than ranks", points=8,
                draw=values.draw_small, judge=values.judge),
        _traffic(name="ring_bytes", title="2 (N - 1) / N of the tensor leaves each rank",
                 points=8, draw=partial(traffic.draw, then=("half",)),
                 judge=traffic.judge_bytes),
        _traffic(name="ring_neighbours", title="to the next rank only", points=6,
                 draw=partial(traffic.draw, then=("small", "empty")),
                 judge=traffic.judge_neighbours),
        _traffic(name="ring_messages", title="one N-th of the tensor at a time", points=6,
                 draw=partial(traffic.draw, then=("mean", "rows", "small")),
                 judge=traffic.judge_messages),
        _traffic(name="ring_time", title="as fast as the links allow, in virtual time", points=7,
                 draw=partial(traffic.draw, op="max"), judge=traffic.judge_time),
        _model(
            name="ring_seconds", title="latency and bandwidth", points=5,
            observe=model.observe_seconds, judge=model.judge_seconds,
        ),
        _model(
            name="ring_choice", title="ring or tree", points=5, **_after_seconds,
            observe=model.observe_choice, judge=model.judge_choice,
        ),
        _model(
            name="ring_bus", title="a bandwidth that can be compared", points=4,
            observe=model.observe_bus, judge=model.judge_bus,
        ),
        Criterion(
            name="ring_hook", title="DDP's gradients through the ring", points=6,
            task="Task 6, DDP", world="emulated", plan=charge_plan, deadline_s=40.0,
            **_after_all_reduce,
            draw=traffic.draw_hook, observe=traffic.observe_hook, judge=traffic.judge_hook,
        ),
    ),
)  # fmt: skip
