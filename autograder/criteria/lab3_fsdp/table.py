"""Lab 3: sharded training. 100 points on a CPU, and 3 extra on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

mark_steps = Later("autograder.criteria.common.emulated.mark_steps")
draw_seeds = Later("autograder.criteria.common.gpu_meter.draw_seeds")
activations, emulated, gpu, limit, memory, planning, prefetch, saving, scratch, shards = later(
    "autograder.criteria.lab3_fsdp",
    "activations emulated gpu limit memory planning prefetch saving scratch shards",
)

_FORMULA = "Task 1, how much memory?"
_MEASURE = "Task 2, measure it"
_SCRATCH = "Task 3, FSDP from scratch"
_NATIVE = "Task 4, the same with fully_shard"
_LARGE = "Task 5, a model that does not fit"
_SAVE = "Task 6, save and load"
_SPEED = "Task 7, throughput and scaling"
_CHOICE = "Task 8, which strategy?"

# The functions of earlier tasks that a later task may call, and the criteria that judge them.
_task3 = ("fsdp_shards", "fsdp_forward", "fsdp_gradients", "fsdp_accumulate", "fsdp_limit")
_after_sharding: dict[str, Any] = {
    "stand_ins": ("FSDP", "shard_model", "policies"),
    "relies_on": (*_task3, "fsdp_units", "fsdp_fully_shard", "fsdp_precision", "fsdp_policies"),
}

_scratch = partial(Criterion, task=_SCRATCH, world="emulated", plan=mark_steps, deadline_s=40.0)
_limited = partial(Criterion, world="none", deadline_s=60.0)
_emulated = partial(
    Criterion, world="emulated", draw=emulated.draw, plan=emulated.plan, deadline_s=40.0
)
_units = partial(
    _emulated, task=_SCRATCH, draw=emulated.draw_evaluated, observe=emulated.observe_class
)
_native = partial(_emulated, task=_NATIVE)
_saving = partial(Criterion, task=_SAVE, draw=saving.draw_checkpoint)

LAB = Lab(
    name="lab3_fsdp",
    title="Sharded training",
    practice_world_size=2,
    grading_world_size=3,
    gates=(Gate("sharding", ("fsdp_shards", "fsdp_limit")),),
    withheld={
        **TRAINING_LOOP,
        "minidist.parallel.fsdp.native": "fully_shard",
        "minidist.parallel.fsdp.state": "checkpoints",
        "minidist.parallel.recompute": "recomputing activations",
        "minidist.parallel.zero.stage3": "own FSDP",
        "minidist.parallel.zero.unit": "own FSDP",
        "minidist.parallel.zero.flat": "own FSDP",
        "minidist.parallel.zero.hooks": "own FSDP",
        "minidist.parallel.zero.checkpoint": "checkpoints",
    },
    criteria=(
        Criterion(
            name="fsdp_memory_formula", title="bytes per rank of four strategies", task=_FORMULA,
            points=6, world="none", draw=memory.draw_formula, observe=memory.observe_formula,
            judge=memory.judge_formula,
        ),
        Criterion(
            name="fsdp_memory_measured", title="bytes that lie on this rank", task=_MEASURE,
            points=5, draw=memory.draw_measured, observe=memory.observe_measured,
            judge=memory.judge_measured,
        ),
        _scratch(
            name="fsdp_shards", title="each rank keeps 1/N", points=7, draw=scratch.draw_mlp,
            observe=shards.observe_shards, judge=shards.judge_shards,
        ),
        _scratch(
            name="fsdp_forward", title="the output is the whole model's", points=6,
            draw=scratch.draw_forward, observe=scratch.observe_forward,
            judge=scratch.judge_forward,
        ),
        _scratch(
            name="fsdp_gradients", title="shards get the mean over ranks", points=7,
            draw=scratch.draw_forward, observe=scratch.observe_gradients,
            judge=scratch.judge_gradients,
        ),
        _scratch(
            name="fsdp_accumulate", title="a second backward adds", points=4,
            draw=scratch.draw_mlp, observe=scratch.observe_accumulate,
            judge=scratch.judge_accumulate,
        ),
        _limited(
            name="fsdp_limit", title="units are freed, under a memory limit", task=_SCRATCH,
            points=7, draw=limit.draw, observe=limit.observe_class, judge=limit.judge_class,
        ),
        _units(
            name="fsdp_units", title="one all-gather, one reduce-scatter per unit", points=7,
            judge=emulated.judge_units, between_ranks=True,
        ),
        _units(
            name="fsdp_prefetch_forward", title="the next unit is gathered meanwhile", points=4,
            judge=prefetch.judge_prefetch_forward, between_ranks=True,
        ),
        _units(
            name="fsdp_prefetch_backward", title="and in backward the one before", points=4,
            judge=prefetch.judge_prefetch_backward, between_ranks=True,
        ),
        _native(
            name="fsdp_fully_shard", title="fully_shard, unit by unit", points=6,
            observe=emulated.observe_native, judge=emulated.judge_native,
        ),
        _native(
            name="fsdp_precision", title="bf16 travels, fp32 is added up", points=5,
            observe=emulated.observe_precision, judge=emulated.judge_precision,
        ),
        Criterion(
            name="fsdp_policies", title="precision and offloading", task=_NATIVE, points=3,
            world="none", draw=saving.draw_policies, observe=saving.observe_policies,
            judge=saving.judge_policies,
        ),
        Criterion(
            name="fsdp_recompute", title="units keep their inputs only", task=_LARGE, points=4,
            world="none", draw=activations.draw, observe=activations.observe,
            judge=activations.judge,
        ),
        _limited(
            name="fsdp_budget", title="trains what does not fit whole", task=_LARGE, points=6,
            **_after_sharding, draw=limit.draw_uneven, observe=limit.observe_function,
            judge=limit.judge_function,
        ),
        _saving(
            name="fsdp_save", title="whole tensors, written by rank 0", points=6,
            world="emulated", observe=saving.observe_save, judge=saving.judge_save,
        ),
        _saving(
            name="fsdp_resume", title="goes on as if it had never stopped", points=5,
            stand_ins=("save_checkpoint",), relies_on=("fsdp_save",),
            observe=saving.observe_resume, judge=saving.judge_resume,
        ),
        Criterion(
            name="fsdp_throughput", title="samples per second of all ranks", task=_SPEED, points=4,
            draw=planning.draw_throughput, observe=planning.observe_throughput,
            judge=planning.judge_throughput,
        ),
        Criterion(
            name="fsdp_choice", title="traffic, and the least sharding that fits", task=_CHOICE,
            points=4, world="none", draw=planning.draw_choice, observe=planning.observe_choice,
            judge=planning.judge_choice, stand_ins=("bytes_per_rank",),
            relies_on=("fsdp_memory_formula",),
        ),
        Criterion(
            name="fsdp_gpu_memory", title="the peak of a GPU is the shards' and a few units'",
            task=_SCRATCH, points=3, needs="cuda", draw=draw_seeds, observe=gpu.observe,
            judge=gpu.judge, deadline_s=120.0,
        ),
    ),
)  # fmt: skip
