"""Bonus: gradient compression with PowerSGD. 100 points on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

columns, feedback, model, power, start, traffic, training = later(
    "autograder.criteria.bonus_powersgd", "columns feedback model power start traffic training"
)
mark_steps = Later("autograder.criteria.common.emulated.mark_steps")

# Functions of earlier tasks that later tasks may call, and the criteria that judge them.
_after_mean: dict[str, Any] = {
    "stand_ins": ("orthonormalise", "packed_mean"),
    "relies_on": ("powersgd_columns", "powersgd_dependent", "powersgd_mean"),
}
_after_step: dict[str, Any] = {
    "stand_ins": (*_after_mean["stand_ins"], "power_step", "matrix_shape"),
    "relies_on": (
        *_after_mean["relies_on"],
        "powersgd_basis",
        "powersgd_factor",
        "powersgd_shapes",
    ),
}

_columns = partial(
    Criterion,
    task="Task 1, orthonormal columns",
    world="none",
    observe=columns.observe_columns,
)
_power = partial(
    Criterion,
    task="Task 3, one step of the power iteration",
    observe=power.observe,
    **_after_mean,
)
_model = partial(
    Criterion, task="Task 5, a whole model", observe=model.observe_steps, **_after_step
)
_traffic = partial(
    Criterion,
    task="Task 5, a whole model",
    draw=traffic.draw,
    plan=mark_steps,
    observe=traffic.observe,
    world="emulated",
    deadline_s=40.0,
    **_after_step,
)
_feedback = partial(
    Criterion, task="Task 6, error feedback", observe=feedback.observe, **_after_step
)
_planning = partial(
    Criterion, task="Task 8, bytes and seconds", draw=training.draw_planning, world="none"
)
_train = partial(Criterion, task="Task 9, train")

LAB = Lab(
    name="bonus_powersgd",
    title="PowerSGD",
    practice_world_size=2,
    grading_world_size=3,
    gates=(Gate("compression", ("powersgd_first", "powersgd_bytes")),),
    withheld={
        **TRAINING_LOOP,
        "minidist.parallel.compression.powersgd": "PowerSGD",
        "minidist.parallel.compression.compressor": "error feedback",
        "minidist.parallel.compression.hook": "the hook",
    },
    criteria=(
        _columns(name="powersgd_columns", title="orthonormal columns", points=7,
                 draw=columns.draw_columns, judge=columns.judge_columns),
        _columns(name="powersgd_dependent", title="columns that depend on each other, and zeros",
                 points=4, draw=columns.draw_dependent, judge=columns.judge_dependent),
        Criterion(
            name="powersgd_mean", title="the means of many tensors", points=5,
            task="Task 2, many tensors, one all-reduce", draw=columns.draw_mean,
            observe=columns.observe_mean, judge=columns.judge_mean,
        ),
        _power(name="powersgd_basis", title="P, the same and orthonormal on all ranks", points=7,
               draw=partial(power.draw_steps, also_none=True), judge=power.judge_basis),
        _power(name="powersgd_factor", title="Q, the mean of the products", points=6,
               draw=power.draw_steps, judge=power.judge_factor),
        Criterion(
            name="powersgd_shapes", title="which parameters are worth it", points=6,
            task="Task 4, is it worth it?", world="none", draw=columns.draw_shapes,
            observe=columns.observe_shapes, judge=columns.judge_shapes,
        ),
        Criterion(
            name="powersgd_seed", title="the same start on all ranks", points=5,
            task="Task 5, a whole model", draw=start.draw_seed, observe=start.observe_seed,
            judge=start.judge_seed, **_after_step,
        ),
        _model(name="powersgd_first", title="one step of a model", points=7,
               draw=model.draw_first, judge=model.judge_first),
        _model(name="powersgd_vectors", title="what is not compressed, exactly", points=5,
               draw=model.draw_vectors, observe=model.observe_vectors, judge=model.judge_vectors),
        _model(name="powersgd_warm", title="Q goes on from step to step", points=6,
               draw=start.draw_warm, judge=start.judge_warm),
        _model(name="powersgd_revive", title="zero does not stay zero", points=3,
               draw=start.draw_revive, judge=start.judge_revive),
        _traffic(name="powersgd_calls", title="three all-reduces per step", points=5,
                 draw=traffic.draw_many, judge=traffic.judge_calls),
        _traffic(name="powersgd_bytes", title="thin matrices and vectors, and nothing else",
                 points=5, judge=traffic.judge_bytes),
        _feedback(name="powersgd_telescope", title="nothing is lost, only late", points=7,
                  draw=feedback.draw_telescope, judge=feedback.judge_telescope),
        _feedback(name="powersgd_errors", title="each rank keeps its own error", points=4,
                  draw=feedback.draw_errors, judge=feedback.judge_errors),
        _feedback(name="powersgd_steps", title="five steps, as one process computes them",
                  points=4, draw=feedback.draw_steps, judge=feedback.judge_steps),
        Criterion(
            name="powersgd_resume", title="a checkpoint has all of it", points=4,
            task="Task 7, a checkpoint", draw=feedback.draw_resume,
            observe=feedback.observe_resume, judge=feedback.judge_resume, **_after_step,
        ),
        _planning(name="powersgd_numbers", title="numbers sent, and the ratio", points=3,
                  stand_ins=("matrix_shape",), relies_on=("powersgd_shapes",),
                  observe=training.observe_numbers, judge=training.judge_numbers),
        _planning(name="powersgd_seconds", title="seconds saved", points=3,
                  stand_ins=("matrix_shape", "numbers_sent"),
                  relies_on=("powersgd_shapes", "powersgd_numbers"),
                  observe=training.observe_seconds, judge=training.judge_seconds),
        _train(name="powersgd_train", title="the loop", points=2, draw=training.draw_train,
               observe=training.observe_train, judge=training.judge_train),
        _train(name="powersgd_converges", title="rank 1 reaches the loss", points=2,
               draw=training.draw_converges, observe=training.observe_converges,
               judge=training.judge_converges, deadline_s=60.0,
               stand_ins=(*_after_step["stand_ins"], "train"),
               relies_on=(*_after_step["relies_on"], "powersgd_train")),
    ),
)  # fmt: skip
