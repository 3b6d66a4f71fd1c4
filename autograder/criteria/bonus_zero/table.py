"""Bonus: ZeRO-1 and ZeRO-2, an optimiser in shards. 100 points on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

flat, limit, norm, planning, saving, traffic, values = later(
    "autograder.criteria.bonus_zero", "flat limit norm planning saving traffic values"
)
charge_plan = Later("autograder.criteria.common.emulated.charge_plan")
mark_steps = Later("autograder.criteria.common.emulated.mark_steps")

_flat = partial(Criterion, task="Task 1, one vector", world="none", draw=flat.draw_flat)
_norm = partial(Criterion, task="Task 3, the norm of what nobody has", observe=norm.observe)
_after_flat: dict[str, Any] = {
    "stand_ins": ("flatten", "unflatten", "trainable_groups"),
    "relies_on": ("zero_flatten", "zero_unflatten", "zero_groups"),
}
_zero1 = partial(Criterion, task="Task 4, ZeRO-1", **_after_flat)
_zero2 = partial(Criterion, task="Task 5, ZeRO-2", **_after_flat)
_IN_ORDER = (
    "Groups are reduced in the same order on all ranks, whatever gradients a rank has: the last "
    "first, and what is not complete at the end."
)
_limited = {"world": "none", "draw": limit.draw, "deadline_s": 60.0}
_saving = partial(Criterion, task="Task 6, save a share", **_after_flat)
_planning = partial(
    Criterion, task="Task 7, what it costs", draw=planning.draw_planning, world="none"
)
_traffic = {"world": "emulated", "plan": mark_steps, "observe": traffic.observe, "deadline_s": 40.0}

LAB = Lab(
    name="bonus_zero",
    title="ZeRO: an optimiser in shards",
    practice_world_size=2,
    grading_world_size=3,
    gates=(Gate("sharding", ("zero1_reduce", "zero1_gather", "zero1_memory")),),
    withheld={
        **TRAINING_LOOP,
        "minidist.parallel.zero": "every task",
    },
    criteria=(
        _flat(name="zero_flatten", title="one vector, padded with zeros", points=5,
              observe=flat.observe_flatten, judge=flat.judge_flatten),
        _flat(name="zero_unflatten", title="and back", points=4,
              observe=flat.observe_unflatten, judge=flat.judge_unflatten),
        Criterion(
            name="zero_groups", title="what there is to train, once", points=5,
            task="Task 2, what there is to train", world="none", draw=flat.draw_groups,
            observe=flat.observe_groups, judge=flat.judge_groups,
        ),
        _norm(name="zero_norm", title="one norm for all ranks", points=5,
              draw=norm.draw, judge=norm.judge),
        _norm(name="zero_norm_cost", title="one number travels", points=3, world="emulated",
              plan=charge_plan, draw=norm.draw_cost, judge=norm.judge_cost),
        _zero1(name="zero1_reduce", title="each rank has its part of the mean", points=7,
               draw=values.draw_reduce, observe=values.observe_reduce,
               judge=values.judge_reduce),
        _zero1(name="zero1_adamw", title="AdamW, as one process computes it", points=7,
               draw=values.draw_adamw, observe=values.observe_adamw, judge=values.judge_adamw),
        _zero1(name="zero1_options", title="groups with options of their own", points=5,
               draw=values.draw_options, observe=values.observe_options,
               judge=values.judge_options),
        _zero1(name="zero1_special", title="frozen, tied, without a gradient", points=5,
               draw=values.draw_special, observe=values.observe_special,
               judge=values.judge_special),
        _zero1(name="zero1_gather", title="each rank sends the share that it updated", points=6,
               draw=traffic.draw_zero1, judge=traffic.judge_zero1, **_traffic),
        _zero1(name="zero1_memory", title="AdamW in shards, under a memory limit", points=6,
               observe=limit.observe_zero1, judge=limit.judge_zero1, **_limited),
        _zero2(name="zero2_accumulate", title="parts of the gradient add up", points=6,
               draw=values.draw_accumulate, observe=values.observe_accumulate,
               judge=values.judge_accumulate),
        _zero2(name="zero2_order", title="one order, whatever gradients there are", points=4,
               world="emulated", plan=charge_plan, draw=values.draw_order,
               observe=values.observe_order, judge=values.judge_order,
               fault_hint=_IN_ORDER),
        _zero2(name="zero2_scatter", title="a reduce-scatter, half the traffic", points=6,
               draw=traffic.draw_zero2, judge=traffic.judge_zero2, **_traffic),
        _zero2(name="zero2_memory", title="gradients go in backward, under a memory limit",
               points=6, observe=limit.observe_zero2, judge=limit.judge_zero2, **_limited),
        _saving(name="zero_saved", title="each rank saves its share", points=2,
                world="emulated", plan=mark_steps, draw=saving.draw_saved,
                observe=saving.observe_saved, judge=saving.judge_saved),
        _saving(name="zero_resume", title="goes on as if it had never stopped", points=4,
                draw=saving.draw_resume, observe=saving.observe_resume,
                judge=saving.judge_resume),
        _saving(name="zero_reshard", title="on a different number of ranks", points=4,
                draw=saving.draw_reshard, observe=saving.observe_reshard,
                judge=saving.judge_reshard, deadline_s=40.0),
        _planning(name="zero_memory", title="bytes that lie on a rank", points=3,
                  observe=planning.observe_memory, judge=planning.judge_memory),
        _planning(name="zero_bytes", title="bytes that a rank sends", points=3,
                  observe=planning.observe_bytes, judge=planning.judge_bytes),
        Criterion(
            name="zero_train", title="a step of several micro-batches", points=4,
            task="Task 8, train", draw=planning.draw_train, observe=planning.observe_train,
            judge=planning.judge_train,
        ),
    ),
)  # fmt: skip
