"""Lab 2: gradient accumulation. 100 points on a CPU."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

charge_plan = Later("autograder.criteria.common.emulated.charge_plan")
amp, ddp, emulated, gradients, loop, loop_judges, planning, traffic = later(
    "autograder.criteria.lab2_accumulation",
    "amp ddp emulated gradients loop loop_judges planning traffic",
)

_ONE = "Task 1, one big batch out of small ones"
_LOOP = "Task 2, a step every k batches"
_DDP = "Task 3, accumulation over ranks"
_TOKENS = "Task 4, every token counts the same"
_AMP = "Task 5, with mixed precision"
_BATCH = "Task 6, the effective batch size"
_CURVES = "Task 7, convergence"

_one = partial(Criterion, task=_ONE, world="none", observe=gradients.observe)
_loop = partial(Criterion, task=_LOOP, world="none", observe=loop.observe)
_ddp = partial(Criterion, task=_DDP, observe=ddp.observe_samples)
_emulated = partial(
    Criterion, task=_DDP, world="emulated", draw=emulated.draw, plan=emulated.plan, deadline_s=40.0
)
_tokens = partial(Criterion, task=_TOKENS, observe=ddp.observe_tokens)
_amp = partial(Criterion, task=_AMP)

LAB = Lab(
    name="lab2_accumulation",
    title="Gradient accumulation",
    practice_world_size=2,
    grading_world_size=3,
    gates=(
        Gate("accumulation", ("accum_scale", "accum_unequal")),
        Gate("one-batch-at-a-time", ("accum_memory", "accum_steps", "accum_ddp_collectives")),
    ),
    withheld={
        **TRAINING_LOOP,
        "minidist.parallel.accumulation": "accumulation",
    },
    criteria=(
        _one(
            name="accum_scale", title="equal micro-batches give the big batch's gradient", points=7,
            world="real", draw=gradients.draw_equal, observe=gradients.observe_together,
            judge=gradients.judge_scale,
        ),
        _one(
            name="accum_unequal", title="micro-batches weigh as many samples as they have",
            points=5, draw=gradients.draw_unequal, judge=gradients.judge_unequal,
        ),
        _one(
            name="accum_loss", title="the loss is the mean over all samples", points=3,
            draw=gradients.draw_loss, judge=gradients.judge_loss,
        ),
        _one(
            name="accum_memory", title="one micro-batch in memory at a time", points=4,
            draw=gradients.draw_memory, observe=gradients.observe_memory,
            judge=gradients.judge_memory,
        ),
        _loop(
            name="accum_steps", title="one step per k batches", points=7,
            draw=loop.draw_steps, observe=loop.observe_steps, judge=loop_judges.judge_steps,
        ),
        _loop(
            name="accum_tail", title="the last, smaller group", points=6,
            draw=loop.draw_tail, judge=loop_judges.judge_tail,
        ),
        _loop(
            name="accum_zero_grad", title="no old gradients in a step", points=4,
            draw=loop.draw_zero_grad, judge=loop_judges.judge_zero_grad,
        ),
        _loop(
            name="accum_clip", title="the accumulated gradient is clipped once", points=5,
            draw=loop.draw_clip, judge=loop_judges.judge_clip,
        ),
        _loop(
            name="accum_schedule", title="the schedule counts optimizer steps", points=3,
            draw=loop.draw_schedule, judge=loop_judges.judge_schedule,
        ),
        _ddp(
            name="accum_ddp_gradients", title="the mean over all ranks and micro-batches",
            points=6, draw=ddp.draw_again, judge=ddp.judge_gradients,
        ),
        _ddp(
            name="accum_ddp_loss", title="the loss is the mean over all ranks", points=3,
            draw=ddp.draw_classes, judge=ddp.judge_loss,
        ),
        _emulated(
            name="accum_ddp_collectives", title="gradients travel once, not k times", points=6,
            draw=emulated.draw_pair_twice, observe=emulated.observe_ddp,
            judge=emulated.judge_collectives, between_ranks=True,
        ),
        _emulated(
            name="accum_ddp_backward", title="backward inside no_sync too", points=4,
            observe=emulated.observe_backward, judge=emulated.judge_backward, between_ranks=True,
        ),
        _emulated(
            name="accum_ddp_time", title="75 % efficiency on slow links, in virtual time",
            points=4, observe=emulated.observe_ddp, judge=emulated.judge_time, between_ranks=True,
        ),
        _tokens(
            name="accum_token_gradients", title="mean over all tokens of all ranks", points=5,
            draw=ddp.draw_tokens, judge=ddp.judge_token_gradients,
        ),
        _tokens(
            name="accum_token_loss", title="the loss is the mean over all tokens", points=3,
            draw=ddp.draw_equal_shapes, judge=ddp.judge_token_loss,
        ),
        Criterion(
            name="accum_token_traffic", title="gradients travel once, not k times", points=2,
            task=_TOKENS, world="emulated", plan=charge_plan, deadline_s=40.0, between_ranks=True,
            draw=traffic.draw_tokens, observe=traffic.observe_tokens, judge=traffic.judge_tokens,
        ),
        _amp(
            name="accum_amp_update", title="one step in half precision", points=4,
            draw=amp.draw_update, observe=amp.observe_update, judge=amp.judge_update,
        ),
        _amp(
            name="accum_amp_scaler", title="the scaler is updated once per step", points=3,
            draw=amp.draw_scaler, observe=amp.observe_scaler, judge=amp.judge_scaler,
        ),
        _amp(
            name="accum_amp_clip", title="unscaled before it is clipped", points=3,
            draw=amp.draw_clip, observe=amp.observe, judge=amp.judge_clip,
        ),
        Criterion(
            name="accum_amp_traffic", title="gradients travel once, not k times", points=2,
            task=_AMP, world="emulated", plan=charge_plan, deadline_s=40.0, between_ranks=True,
            draw=traffic.draw_amp, observe=traffic.observe_amp, judge=traffic.judge_amp,
        ),
        Criterion(
            name="accum_batch_size", title="batch size and learning rate", task=_BATCH, points=5,
            world="none", draw=planning.draw_batch_size, observe=planning.observe_batch_size,
            judge=planning.judge_batch_size,
        ),
        Criterion(
            name="accum_convergence", title="every k gives the same curve", task=_CURVES, points=6,
            draw=planning.draw_convergence, observe=planning.observe_convergence,
            judge=planning.judge_convergence,
        ),
    ),
)  # fmt: skip
