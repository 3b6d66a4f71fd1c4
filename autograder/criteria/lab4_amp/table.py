"""Lab 4: automatic mixed precision. 100 points on a CPU, and 5 extra on a GPU."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

charge_plan = Later("autograder.criteria.common.emulated.charge_plan")
draw_seeds = Later("autograder.criteria.common.gpu_meter.draw_seeds")
autocast, clipped_steps, formats, gpu, growth, hook, loop = later(
    "autograder.criteria.lab4_amp", "autocast clipped_steps formats gpu growth hook loop"
)
masters, measure, overflow, plain_steps, scaler, timing = later(
    "autograder.criteria.lab4_amp", "masters measure overflow plain_steps scaler timing"
)

_FORMATS = "Task 1, what 16 bits can hold"
_SCALER = "Task 2, the loss scaler"
_LOOP = "Task 3, the training loop"
_MEMORY = "Task 4, measure memory"
_SPEED = "Task 5, measure speed"
_CHOICE = "Task 6, fp16, bf16 or neither"
_MASTERS = "Task 7, master weights"
_HOOK = "Task 8, gradients travel in 16 bits"

_scaler = partial(Criterion, task=_SCALER)
_loop = partial(Criterion, task=_LOOP)
_gpu = partial(
    Criterion, task=_LOOP, needs="cuda", draw=draw_seeds, observe=gpu.observe, deadline_s=120.0
)
_hook = partial(
    Criterion, task=_HOOK, world="emulated", plan=charge_plan, observe=hook.observe, deadline_s=40.0
)

LAB = Lab(
    name="lab4_amp",
    title="Automatic mixed precision",
    practice_world_size=2,
    grading_world_size=3,
    gates=(Gate("overflow-handling", ("amp_scaler_finds", "amp_scaler_agrees")),),
    withheld={
        **TRAINING_LOOP,
        "minidist.precision.scaler": "loss scaling",
        "minidist.precision.training": "the loop",
        "minidist.precision.master": "master weights",
    },
    criteria=(
        Criterion(
            name="amp_lost_share", title="what underflows in a format", task=_FORMATS, points=4,
            world="none", draw=formats.draw_share, observe=formats.observe_share,
            judge=formats.judge_share,
        ),
        Criterion(
            name="amp_safe_scale", title="the largest scale that overflows on no rank",
            task=_FORMATS, points=4, draw=formats.draw_safe, observe=formats.observe_safe,
            judge=formats.judge_safe,
        ),
        _scaler(
            name="amp_scaler_scale", title="the loss times the scale", points=4,
            draw=scaler.draw_scale, observe=scaler.observe_scale, judge=scaler.judge_scale,
        ),
        _scaler(
            name="amp_scaler_unscale", title="gradients are divided once", points=6,
            draw=scaler.draw_unscale, observe=scaler.observe_unscale, judge=scaler.judge_unscale,
        ),
        _scaler(
            name="amp_scaler_finds", title="inf and nan, wherever they are", points=5,
            draw=overflow.draw_finds, observe=overflow.observe_finds, judge=overflow.judge_finds,
        ),
        _scaler(
            name="amp_scaler_agrees", title="all ranks leave out the same steps", points=8,
            draw=overflow.draw_agrees, observe=overflow.observe_agrees,
            judge=overflow.judge_agrees,
        ),
        _scaler(
            name="amp_scaler_grows", title="the scale grows and backs off", points=6,
            draw=growth.draw_grows, observe=growth.observe_grows, judge=growth.judge_grows,
        ),
        _scaler(
            name="amp_scaler_state", title="saved and restored", points=4,
            draw=growth.draw_state, observe=growth.observe_state, judge=growth.judge_state,
        ),
        _loop(
            name="amp_loop_autocast", title="autocast where it belongs, and only there", points=6,
            draw=autocast.draw, observe=autocast.observe, judge=autocast.judge,
        ),
        _loop(
            name="amp_loop_fp16", title="trains where fp16 alone loses every gradient", points=5,
            draw=loop.draw_fp16, observe=loop.observe, judge=plain_steps.judge_fp16,
        ),
        _loop(
            name="amp_loop_update", title="the scale changes once per step, at its end", points=4,
            draw=loop.draw_update, observe=loop.observe, judge=plain_steps.judge_update,
        ),
        _loop(
            name="amp_loop_clip", title="unscaled before it is clipped", points=4,
            draw=loop.draw_clip, observe=loop.observe, judge=clipped_steps.judge_clip,
        ),
        _loop(
            name="amp_loop_skips", title="a skipped step leaves no trace", points=5,
            draw=loop.draw_skips, observe=loop.observe, judge=clipped_steps.judge_skips,
        ),
        _loop(
            name="amp_loop_accumulates", title="k batches per step, one scale", points=4,
            draw=loop.draw_accumulates, observe=loop.observe, judge=plain_steps.judge_accumulates,
        ),
        Criterion(
            name="amp_memory", title="bytes of a training step", task=_MEMORY, points=7,
            world="none", draw=measure.draw_memory, observe=measure.observe_memory,
            judge=measure.judge_memory,
        ),
        Criterion(
            name="amp_timing", title="seconds of a step on a device that queues", task=_SPEED,
            points=6, draw=timing.draw_timing, observe=timing.observe_timing,
            judge=timing.judge_timing,
        ),
        Criterion(
            name="amp_choice", title="one precision for all ranks", task=_CHOICE, points=4,
            draw=formats.draw_choice, observe=formats.observe_choice, judge=formats.judge_choice,
        ),
        Criterion(
            name="amp_masters", title="small updates add up in float32", task=_MASTERS, points=6,
            world="none", draw=masters.draw, observe=masters.observe, judge=masters.judge,
        ),
        _hook(
            name="amp_hook_mean", title="the mean over ranks, through 16 bits", points=4,
            draw=hook.draw_mean, judge=hook.judge_mean,
        ),
        _hook(
            name="amp_hook_bytes", title="half of the bytes", points=4,
            draw=hook.draw_bytes, judge=hook.judge_bytes, between_ranks=True,
        ),
        _gpu(
            name="amp_gpu_speed", title="twice as fast as float32", points=3,
            judge=gpu.judge_speed,
        ),
        _gpu(
            name="amp_gpu_memory", title="three quarters of float32's memory", points=2,
            judge=gpu.judge_memory,
        ),
    ),
)  # fmt: skip
