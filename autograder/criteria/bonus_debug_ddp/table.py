"""Bonus: debug a broken DDP. Eleven broken programs; 100 points on a CPU."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import OWN_DDP, TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Lab
from autograder.criteria.later import Later, later

buckets, meet, seeds, single_steps, state, train = later(
    "autograder.criteria.bonus_debug_ddp", "buckets meet seeds single_steps state train"
)
charge_plan = Later("autograder.criteria.common.emulated.charge_plan")

_train = partial(
    Criterion, task="Case 1, a script with four bugs", observe=train.observe, deadline_s=30.0
)
_step = partial(
    Criterion,
    task="Case 2, the ranks agree",
    observe=single_steps.observe_step,
    world="emulated",  # a missing wait for an all-reduce shows in each run
    plan=charge_plan,
)
_bucket = partial(
    Criterion,
    task="Case 3, gradients in buckets",
    observe=buckets.observe_buckets,
    world="emulated",
    plan=charge_plan,
    deadline_s=40.0,
)
_accumulate = partial(
    Criterion,
    task="Case 4, half the learning rate",
    draw=single_steps.draw_accumulate,
    observe=single_steps.observe_accumulate,
)
_amp = partial(
    Criterion,
    task="Case 5, a scaler of our own",
    observe=single_steps.observe_scaled,
)
_broadcast = partial(
    Criterion,
    task="Case 6, the same start",
    observe=state.observe_broadcast,
    judge=state.judge_broadcast,
)
_evaluate = partial(
    Criterion,
    task="Case 7, the score depends on the cluster",
    observe=meet.observe_evaluate,
)
_resume = partial(Criterion, task="Case 8, the bump after the restart")
_metrics = partial(
    Criterion,
    task="Case 10, an accuracy of 1.5",
    observe=meet.observe_metrics,
    judge=meet.judge_metrics,
    world="emulated",
    plan=meet.plan,
    deadline_s=40.0,
)
_seed = partial(
    Criterion,
    task="Case 11, seeds",
    draw=seeds.draw_seeds,
    observe=seeds.observe_seeds,
    world="none",
)

LAB = Lab(
    name="bonus_debug_ddp",
    title="Debug a broken DDP",
    practice_world_size=2,
    grading_world_size=3,
    withheld={
        **OWN_DDP,
        **TRAINING_LOOP,
        "minidist.sampler": "a mended loop",
        "minidist.seeding": "a mended loop",
        "minidist.metrics": "a mended loop",
        "minidist.checkpoint.store": "a mended loop",
        "minidist.precision.training": "a mended loop",
        "minidist.elastic": "a mended loop",
    },
    criteria=(
        _train(
            name="debug_train_data", title="all ranks train on one dataset", points=4,
            draw=train.draw_data, judge=train.judge_data,
        ),
        _train(
            name="debug_train_shares", title="each sample on one rank", points=4,
            draw=train.draw_shares, judge=train.judge_shares,
        ),
        _train(
            name="debug_train_epochs", title="each epoch in an order of its own", points=3,
            draw=train.draw_epochs, judge=train.judge_epochs,
        ),
        _train(
            name="debug_train_zero_grad", title="no old gradients, all ranks' in", points=4,
            draw=train.draw_zero_grad, judge=train.judge_zero_grad,
        ),
        _train(
            name="debug_train_saved", title="a file that loads without DDP", points=3,
            draw=train.draw_saved, judge=train.judge_saved,
        ),
        _step(
            name="debug_step_adam", title="average gradients, not weights", points=6,
            draw=single_steps.draw_adam, judge=single_steps.judge_adam,
        ),
        _step(
            name="debug_step_mean", title="the mean, whatever the number of ranks", points=4,
            draw=single_steps.draw_sgd, judge=single_steps.judge_sgd,
        ),
        _bucket(
            name="debug_bucket_tail", title="the last bucket travels too", points=5,
            draw=buckets.draw_tail, judge=buckets.judge_tail,
        ),
        _bucket(
            name="debug_bucket_wait", title="each handle is waited for", points=6,
            draw=buckets.draw_wait, judge=buckets.judge_wait,
        ),
        _accumulate(
            name="debug_accumulate_scale", title="divided by the ranks once", points=5,
            judge=single_steps.judge_accumulate,
        ),
        _accumulate(
            name="debug_accumulate_loss", title="a loss of all ranks, not of rank 0", points=3,
            judge=single_steps.judge_loss,
        ),
        _amp(
            name="debug_amp_order", title="unscaled by the scale that it was scaled with",
            points=6, draw=single_steps.draw_scaler, judge=single_steps.judge_scaler,
        ),
        _amp(
            name="debug_amp_clip", title="the true gradient is clipped", points=5,
            draw=single_steps.draw_clip, judge=single_steps.judge_clip,
        ),
        _broadcast(
            name="debug_broadcast_buffers", title="buffers are state too", points=5,
            draw=state.draw_buffers,
        ),
        _broadcast(
            name="debug_broadcast_frozen", title="frozen parameters too", points=3,
            draw=state.draw_frozen,
        ),
        _evaluate(
            name="debug_evaluate_tail", title="no sample counts twice", points=5,
            draw=meet.draw_tail, judge=meet.judge_tail,
        ),
        _evaluate(
            name="debug_evaluate_batches", title="a mean over samples, not over batches", points=4,
            draw=meet.draw_batches, judge=meet.judge_batches,
        ),
        _resume(
            name="debug_resume_optimizer", title="the optimizer's state comes back", points=4,
            draw=state.draw_resume, observe=state.observe_resume, judge=state.judge_resume,
        ),
        _resume(
            name="debug_resume_random", title="each rank's random numbers go on", points=5,
            draw=state.draw_random, observe=state.observe_random, judge=state.judge_random,
        ),
        Criterion(
            name="debug_once", title="nobody loads before it is built",
            task="Case 9, once is enough", points=4, world="emulated", plan=meet.plan,
            draw=meet.draw_once, observe=meet.observe_once, judge=meet.judge_once,
            deadline_s=40.0,
        ),
        _metrics(
            name="debug_metrics_order", title="the same order on all ranks", points=4,
            draw=meet.draw_order,
        ),
        _metrics(
            name="debug_metrics_missing", title="a metric that some ranks do not have", points=3,
            draw=meet.draw_missing,
        ),
        _seed(
            name="debug_seed_weights", title="the same weights on all ranks", points=2,
            judge=seeds.judge_seed_weights,
        ),
        _seed(
            name="debug_seed_dropout", title="each rank drops units of its own", points=3,
            judge=seeds.judge_seed_dropout,
        ),
    ),
)  # fmt: skip
