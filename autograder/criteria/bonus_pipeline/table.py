"""Bonus: pipeline parallelism from scratch. 100 points on a CPU."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Lab
from autograder.criteria.later import Later, later

emulated, messages, model, orders, plan, tokens, training, values = later(
    "autograder.criteria.bonus_pipeline",
    "emulated messages model orders plan tokens training values",
)
charge_plan = Later("autograder.criteria.common.emulated.charge_plan")

_schedule = partial(
    Criterion,
    task="Task 2, two schedules",
    draw=plan.draw_schedules,
    observe=plan.observe_schedules,
    world="none",
)
_run = partial(Criterion, task="Task 4, the pipeline", observe=values.observe_gradients)
_run_emulated = partial(
    _run,
    world="emulated",
    plan=charge_plan,
    deadline_s=40.0,
)
_JUDGE_PIPELINE = tuple(
    f"pipe_{what}"
    for what in (
        "gradients", "orders", "tokens", "scale", "uneven", "accumulate", "loss", "messages",
        "limit", "time",
    )
)  # fmt: skip

LAB = Lab(
    name="bonus_pipeline",
    title="Pipeline parallelism",
    practice_world_size=3,
    grading_world_size=4,
    withheld={
        **TRAINING_LOOP,
        "minidist.parallel.pipeline": "every task",
        "minidist.cost.pipeline": "bubbles",
    },
    criteria=(
        Criterion(
            name="pipe_cut", title="stages that cost the same, as far as possible", points=6,
            task="Task 1, stages", world="none", draw=plan.draw_cut,
            observe=plan.observe_cut, judge=plan.judge_cut,
        ),
        _schedule(name="pipe_gpipe", title="GPipe as a list", points=5, judge=plan.judge_gpipe),
        _schedule(name="pipe_1f1b", title="1F1B as a list", points=8, judge=plan.judge_1f1b),
        Criterion(
            name="pipe_kept", title="what a schedule keeps", points=5,
            task="Task 2, two schedules", world="none", draw=plan.draw_kept,
            observe=plan.observe_kept, judge=plan.judge_kept,
        ),
        Criterion(
            name="pipe_bubble", title="the bubble, as a share and in seconds", points=5,
            task="Task 3, the bubble", world="none", draw=model.draw,
            observe=model.observe_bubble, judge=model.judge_bubble,
        ),
        Criterion(
            name="pipe_choice", title="enough micro-batches, and no more", points=3,
            task="Task 3, the bubble", world="none", draw=model.draw,
            observe=model.observe_choice, judge=model.judge_choice,
            stand_ins=("bubble_fraction",), relies_on=("pipe_bubble",),
        ),
        _run(
            name="pipe_gradients", title="the gradients of the whole batch", points=8,
            draw=values.draw_gradients, judge=values.judge_gradients,
        ),
        _run(
            name="pipe_orders", title="whatever the schedule, and without a deadlock", points=8,
            draw=orders.draw_orders, observe=orders.observe_orders, judge=orders.judge_orders,
        ),
        _run_emulated(
            name="pipe_tokens", title="integers in, float64 on the way", points=4,
            draw=tokens.draw_tokens, observe=tokens.observe_tokens, judge=tokens.judge_tokens,
        ),
        _run_emulated(
            name="pipe_scale", title="the mean of the micro-batches, not their sum", points=6,
            draw=values.draw_scale, judge=values.judge_scale,
        ),
        _run_emulated(
            name="pipe_uneven", title="micro-batches of different sizes", points=5,
            draw=values.draw_uneven, observe=values.observe_uneven,
            judge=values.judge_uneven,
        ),
        _run_emulated(
            name="pipe_accumulate", title="adds to the gradients that are there", points=4,
            draw=values.draw_accumulate, observe=values.observe_accumulate,
            judge=values.judge_accumulate,
        ),
        _run_emulated(
            name="pipe_loss", title="the loss of the batch, on every rank", points=5,
            draw=values.draw_scale, observe=values.observe_loss, judge=values.judge_loss,
        ),
        _run_emulated(
            name="pipe_messages", title="M activations on, M gradients back, nothing else",
            points=6, draw=messages.draw_messages, observe=messages.observe_messages,
            judge=messages.judge_messages,
        ),
        _run_emulated(
            name="pipe_limit", title="room for the micro-batches of 1F1B, and no more", points=6,
            draw=emulated.draw_limit, observe=emulated.observe_limit, judge=emulated.judge_limit,
        ),
        _run_emulated(
            name="pipe_time", title="no larger bubble than the theory's, in virtual time",
            points=6, plan=emulated.plan, draw=emulated.draw_time,
            observe=emulated.observe_time, judge=emulated.judge_time,
        ),
        Criterion(
            name="pipe_train", title="one step of the optimizer per batch", points=6,
            task="Task 5, training", world="emulated", plan=charge_plan, deadline_s=40.0,
            draw=training.draw_train, observe=training.observe_train, judge=training.judge_train,
            stand_ins=("run_pipeline",), relies_on=_JUDGE_PIPELINE,
        ),
        Criterion(
            name="pipe_bytes", title="bytes of a pipeline and of data parallelism", points=4,
            task="Task 6, against data parallelism", world="none", draw=model.draw,
            observe=model.observe_bytes, judge=model.judge_bytes,
        ),
    ),
)  # fmt: skip
