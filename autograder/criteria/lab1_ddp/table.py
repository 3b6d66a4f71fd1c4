"""Lab 1: distributed data parallel. 100 points on a CPU."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import OWN_DDP, TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import later

emulated, gradients_in_sync, joining, odd_parameters, sampler, scratch, script, training = later(
    "autograder.criteria.lab1_ddp",
    "emulated gradients_in_sync joining odd_parameters sampler scratch script training",
)

_SETUP = "Task 1, the process group"
_WRAP = "Task 2, torch's DDP"
_SAMPLER = "Task 3, a sampler that deals out the data"
_LOOP = "Task 4, the training loop"
_SCRIPT = "Task 5, a script under torchrun"
_VERIFY = "Task 6, are the gradients in sync?"
_SCRATCH = "Task 7, DDP from scratch"

_sampler = partial(Criterion, task=_SAMPLER, world="none", observe=sampler.observe)
_train = partial(Criterion, task=_LOOP, observe=training.observe_train)
_scratch = partial(Criterion, task=_SCRATCH)
_emulated = partial(
    Criterion, task=_SCRATCH, world="emulated", observe=emulated.observe, deadline_s=40.0,
    between_ranks=True,
)  # fmt: skip

LAB = Lab(
    name="lab1_ddp",
    title="Distributed data parallel",
    practice_world_size=2,
    grading_world_size=3,
    gates=(Gate("averaging", ("ddp_gradients", "ddp_tied_frozen", "ddp_unused")),),
    withheld={
        **OWN_DDP,
        **TRAINING_LOOP,
        "minidist.sampler": "sampler",
    },
    criteria=(
        Criterion(
            name="setup", title="every rank joins one process group", task=_SETUP, points=5,
            world="own", draw=joining.draw_setup, observe=joining.observe_setup,
            judge=joining.judge_setup,
        ),
        Criterion(
            name="wrap_model", title="torch's DDP around a model", task=_WRAP, points=5,
            draw=joining.draw_wrap, observe=joining.observe_wrap, judge=joining.judge_wrap,
        ),
        _sampler(
            name="sampler_partition", title="every sample on exactly one rank", points=7,
            draw=sampler.draw_partition, judge=sampler.judge_partition,
        ),
        _sampler(
            name="sampler_tail", title="sizes that do not divide", points=6,
            draw=sampler.draw_tail, judge=sampler.judge_tail,
        ),
        _sampler(
            name="sampler_epoch", title="a different order in every epoch", points=5,
            draw=sampler.draw_epoch, judge=sampler.judge_epoch,
        ),
        _train(
            name="train_steps", title="training equals one process on the global batch", points=8,
            draw=training.draw_train_steps, judge=training.judge_train_steps,
        ),
        _train(
            name="train_epochs", title="the sampler is told each epoch", points=4,
            draw=training.draw_train_epochs, judge=training.judge_train_epochs,
        ),
        _train(
            name="train_loss", title="the loss is the mean over all ranks", points=5,
            draw=training.draw_train_loss, judge=training.judge_train_loss,
        ),
        Criterion(
            name="script", title="train_ddp.py under torchrun", task=_SCRIPT, points=8,
            world="none", draw=script.draw_script, observe=script.observe_script,
            judge=script.judge_script, deadline_s=190.0,
        ),
        Criterion(
            name="gradients_in_sync", title="tells whether gradients agree", task=_VERIFY, points=7,
            draw=gradients_in_sync.draw, observe=gradients_in_sync.observe,
            judge=gradients_in_sync.judge,
        ),
        _scratch(
            name="ddp_weights", title="weights become rank 0's", points=5,
            draw=scratch.draw_wrapping, observe=scratch.observe_wrapping,
            judge=scratch.judge_weights,
        ),
        _scratch(
            name="ddp_buffers", title="buffers become rank 0's", points=3,
            draw=scratch.draw_wrapping, observe=scratch.observe_wrapping,
            judge=scratch.judge_buffers,
        ),
        _scratch(
            name="ddp_gradients", title="gradients are the mean over ranks", points=8,
            draw=scratch.draw_gradients, observe=scratch.observe_gradients,
            judge=scratch.judge_gradients,
        ),
        _scratch(
            name="ddp_tied_frozen", title="tied, frozen and float64 parameters", points=4,
            draw=odd_parameters.draw_tied, observe=odd_parameters.observe_tied,
            judge=odd_parameters.judge_tied,
        ),
        _scratch(
            name="ddp_unused", title="parameters that some ranks do not use", points=4,
            draw=odd_parameters.draw_unused, observe=odd_parameters.observe_unused,
            judge=odd_parameters.judge_unused,
        ),
        _emulated(
            name="ddp_buckets", title="no bucket larger than asked for", points=5,
            draw=emulated.draw_buckets, plan=emulated.plan_buckets, judge=emulated.judge_buckets,
        ),
        _emulated(
            name="ddp_overlap", title="reduction starts before backward has ended", points=5,
            draw=emulated.draw_steps, plan=emulated.plan_steps, judge=emulated.judge_overlap,
        ),
        _emulated(
            name="ddp_scaling", title="90 % scaling efficiency in virtual time", points=6,
            draw=emulated.draw_steps, plan=emulated.plan_steps, judge=emulated.judge_scaling,
        ),
    ),
)  # fmt: skip
