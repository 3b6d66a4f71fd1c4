"""Bonus: elastic training, workers join and leave. 100 points on a CPU, with no second machine."""

from __future__ import annotations

from functools import partial

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Lab
from autograder.criteria.later import later

interrupted, loading, sampler, saving, script, shares, states, stopping = later(
    "autograder.criteria.bonus_elastic",
    "interrupted loading sampler saving script shares states stopping",
)

_SHARES = "Task 1, the same batch at any size"
_shares = partial(Criterion, task=_SHARES)
_sampler = partial(Criterion, task="Task 2, an epoch that goes on", world="none")
_saving = partial(Criterion, task="Task 3, one state for all")
_states = partial(Criterion, task="Task 4, from M ranks to N", world="none")
_stopping = partial(Criterion, task="Task 5, stop together")
_script = partial(
    Criterion,
    task="Task 6, the whole script",
    world="none",
    deadline_s=200.0,
)

LAB = Lab(
    name="bonus_elastic",
    title="Elastic training: workers join and leave",
    practice_world_size=2,
    grading_world_size=3,
    withheld={
        **TRAINING_LOOP,
        "minidist.checkpoint.store": "saving",
        "minidist.checkpoint.shards": "resharding",
        "minidist.elastic": "preemption",
        "minidist.sampler": "sampler",
    },
    criteria=(
        _shares(name="elastic_share", title="shares of a batch at any world size", points=5,
                world="none", draw=shares.draw_share, observe=shares.observe_share,
                judge=shares.judge_share),
        _shares(name="elastic_gradient", title="unequal shares, one gradient", points=7,
                draw=shares.draw_gradient, observe=shares.observe_gradient,
                judge=shares.judge_gradient),
        _shares(name="elastic_idle", title="a rank without a sample takes part", points=4,
                draw=shares.draw_idle, observe=shares.observe_idle, judge=shares.judge_idle),
        _sampler(name="elastic_epoch", title="every sample once, the rest at the end", points=6,
                 draw=sampler.draw_epoch, observe=sampler.observe_epoch,
                 judge=sampler.judge_epoch),
        _sampler(name="elastic_order", title="the order is seed's and epoch's", points=5,
                 draw=sampler.draw_order, observe=sampler.observe_order,
                 judge=sampler.judge_order),
        _sampler(name="elastic_resize", title="the epoch goes on with other ranks", points=8,
                 draw=sampler.draw_resize, observe=sampler.observe_resize,
                 judge=sampler.judge_resize),
        _saving(name="elastic_atomic", title="a death in the middle of a save does no harm",
                points=5, world="none", draw=saving.draw_atomic, observe=saving.observe_atomic,
                judge=saving.judge_atomic, deadline_s=260.0),
        _saving(name="elastic_writer", title="one writes, all wait", points=4,
                draw=saving.draw_writer, observe=saving.observe_writer,
                judge=saving.judge_writer),
        _saving(name="elastic_keep", title="the last k are kept", points=3,
                draw=saving.draw_keep, observe=saving.observe_keep, judge=saving.judge_keep),
        _saving(name="elastic_agree", title="a step that all ranks can load", points=7,
                draw=loading.draw_agree, observe=loading.observe_loads,
                judge=loading.judge_loads),
        _saving(name="elastic_damaged", title="half a file is no checkpoint", points=4,
                draw=loading.draw_damaged, observe=loading.observe_loads,
                judge=loading.judge_loads),
        _states(name="elastic_reshard", title="joined, cut anew, padded anew", points=7,
                draw=states.draw_reshard, observe=states.observe_reshard,
                judge=states.judge_reshard),
        _states(name="elastic_own", title="a part holds no more than a part", points=3,
                draw=states.draw_own, observe=states.observe_reshard,
                judge=states.judge_own),
        _states(name="elastic_adam", title="AdamW goes on with other ranks", points=4,
                draw=states.draw_adam, observe=states.observe_adam, judge=states.judge_adam),
        _stopping(name="elastic_stop", title="one hears it, all stop at the same step", points=6,
                  draw=stopping.draw_stop, observe=stopping.observe_stop,
                  judge=stopping.judge_stop),
        _stopping(name="elastic_handler", title="afterwards signals are as before", points=3,
                  world="none", draw=stopping.draw_handler, observe=stopping.observe_handler,
                  judge=stopping.judge_handler),
        _script(name="elastic_script", title="the script, undisturbed, where nothing divides",
                points=7, draw=script.draw_script, observe=script.observe_script,
                judge=script.judge_script),
        _script(name="elastic_rejoin", title="the same curve after ranks left and joined",
                points=8, draw=interrupted.draw_rejoin, observe=interrupted.observe_rejoin,
                judge=interrupted.judge_rejoin),
        _script(name="elastic_preempted", title="told to stop: saved once, a good end", points=4,
                draw=interrupted.draw_preempted, observe=interrupted.observe_preempted,
                judge=interrupted.judge_preempted),
    ),
)  # fmt: skip
