"""Lab 6: profiling and performance. 100 points on a CPU, and 3 extra on several GPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

from autograder.criteria.common.withheld import TRAINING_LOOP
from autograder.criteria.criterion import Criterion, Gate, Lab
from autograder.criteria.later import Later, later

draw_seeds = Later("autograder.criteria.common.gpu_meter.draw_seeds")
ahead, buckets, causes, emulated, gpu, loader, record, scaling, shares = later(
    "autograder.criteria.lab6_profiling",
    "ahead buckets causes emulated gpu loader record scaling shares",
)

_RECORD = "Task 1, record a run"
_SHARES = "Task 2, where the time goes"
_CAUSES = "Task 3, find the bottleneck"
_LOADER = "Task 4, load data ahead"
_BUCKETS = "Task 5, buckets that fit the network"
_SCALING = "Task 6, how it scales"

# Functions that later ones may call, and the criteria that judge them.
_UTILISATION = ("covered", "utilisation")
_OVERLAP = (*_UTILISATION, "overlap")
_after_utilisation: dict[str, Any] = {"stand_ins": _UTILISATION, "relies_on": ("prof_utilisation",)}
_after_overlap: dict[str, Any] = {
    "stand_ins": _OVERLAP,
    "relies_on": ("prof_utilisation", "prof_overlap"),
}
_after_shares: dict[str, Any] = {
    "stand_ins": (*_OVERLAP, "breakdown"),
    "relies_on": ("prof_utilisation", "prof_overlap", "prof_breakdown"),
}
_after_plan: dict[str, Any] = {
    "stand_ins": ("plan_buckets",),
    "relies_on": ("prof_bucket_plan",),
}
_share = partial(Criterion, task=_SHARES, world="none")
_cause = partial(
    Criterion,
    task=_CAUSES,
    world="none",
    observe=causes.observe,
    points=4,
    deadline_s=30.0,
    **_after_shares,
)
_loader = partial(Criterion, task=_LOADER, world="none", deadline_s=40.0)
_plan = partial(Criterion, task=_BUCKETS, world="none", deadline_s=30.0)
_emulated = partial(
    Criterion,
    task=_BUCKETS,
    world="emulated",
    plan=emulated.charge_plan,
    observe=emulated.observe_steps,
    deadline_s=40.0,
)


def _finds(cause: str) -> dict[str, Any]:
    return {
        "draw": partial(causes.draw_cause, cause=cause),
        "judge": partial(causes.judge_cause, cause=cause),
    }


LAB = Lab(
    name="lab6_profiling",
    title="Profiling and performance",
    practice_world_size=2,
    grading_world_size=3,
    gates=(
        Gate(
            "finding-causes",
            ("prof_finds_loader", "prof_finds_copies", "prof_finds_logging", "prof_finds_straggler",
             "prof_finds_buckets"),
            needed=3,
        ),
    ),
    withheld={
        **TRAINING_LOOP,
        "minidist.profile.trace": "spans of a trace",
        "minidist.profile.overlap": "shares of time",
        "minidist.profile.intervals": "shares of time",
        "minidist.profile.stragglers": "the bottleneck",
        "minidist.profile.loader": "loading ahead",
    },
    criteria=(
        Criterion(
            name="prof_record", title="torch's profiler around the steps that count",
            task=_RECORD, points=5, draw=record.draw_record, observe=record.observe_record,
            judge=record.judge_record, deadline_s=40.0,
        ),
        Criterion(
            name="prof_spans_cpu", title="reads the trace of a CPU", task=_RECORD, points=4,
            world="none", draw=record.draw_cpu, observe=record.observe_spans,
            judge=record.judge_spans,
        ),
        Criterion(
            name="prof_spans_gpu", title="reads the trace of a GPU", task=_RECORD, points=4,
            world="none", draw=record.draw_gpu, observe=record.observe_spans,
            judge=record.judge_spans,
        ),
        _share(
            name="prof_utilisation", title="how busy the device is", points=5,
            draw=shares.draw_utilisation, observe=shares.observe_share,
            judge=shares.judge_utilisation,
        ),
        _share(
            name="prof_overlap", title="how much communication hides", points=5,
            draw=shares.draw_overlap, observe=shares.observe_share, judge=shares.judge_overlap,
            **_after_utilisation,
        ),
        _share(
            name="prof_breakdown", title="every moment belongs to one part", points=5,
            **_after_overlap,
            draw=shares.draw_breakdown, observe=shares.observe_breakdown,
            judge=shares.judge_breakdown,
        ),
        _share(
            name="prof_export", title="a trace that a viewer can draw", points=4,
            draw=shares.draw_export, observe=shares.observe_export, judge=shares.judge_export,
        ),
        _cause(
            name="prof_finds_loader", title="finds slow data loading",
            **_finds("loader"),
        ),
        _cause(
            name="prof_finds_copies", title="finds copies that are waited for",
            **_finds("copies"),
        ),
        _cause(
            name="prof_finds_logging", title="finds a rank that stops to log",
            **_finds("logging"),
        ),
        _cause(
            name="prof_finds_straggler", title="finds a rank that computes longer",
            **_finds("straggler"),
        ),
        _cause(
            name="prof_finds_buckets", title="tells small buckets from waiting for a rank",
            **_finds("buckets"),
        ),
        _cause(
            name="prof_finds_nothing", title="leaves a healthy run alone, up to the limit",
            **_finds("none"),
        ),
        _loader(
            name="prof_loader_wait", title="how long the loop waits for data", points=4,
            draw=loader.draw_wait, observe=loader.observe_wait, judge=loader.judge_wait,
        ),
        _loader(
            name="prof_prefetch", title="batches are made ahead, but not too many", points=4,
            draw=ahead.draw_ahead, observe=ahead.observe_ahead, judge=ahead.judge_ahead,
        ),
        _loader(
            name="prof_prefetch_ends", title="order, errors and the end of the thread", points=3,
            draw=ahead.draw_ends, observe=ahead.observe_ends, judge=ahead.judge_ends,
        ),
        _loader(
            name="prof_loader_settings", title="workers, pinned memory and cores", points=3,
            draw=loader.draw_settings, observe=loader.observe_settings,
            judge=loader.judge_settings,
        ),
        _plan(
            name="prof_bucket_plan", title="which gradients travel together", points=3,
            draw=buckets.draw_plans, observe=buckets.observe_plans, judge=buckets.judge_plans,
        ),
        _plan(
            name="prof_bucket_predict", title="how long a step takes with a plan", points=4,
            draw=buckets.draw_predictions, observe=buckets.observe_predictions,
            judge=buckets.judge_predictions,
        ),
        _plan(
            name="prof_bucket_tune", title="the plan that suits a network", points=3,
            **_after_plan,
            draw=buckets.draw_tuning, observe=buckets.observe_tuning, judge=buckets.judge_tuning,
        ),
        Criterion(
            name="prof_bucket_mean", title="gradients are the mean over ranks", task=_BUCKETS,
            points=3, draw=emulated.draw_mean, observe=emulated.observe_mean,
            judge=emulated.judge_mean,
        ),
        _emulated(
            name="prof_bucket_sends", title="one all-reduce per bucket of the plan", points=3,
            draw=emulated.draw_steps, judge=emulated.judge_sends, between_ranks=True,
        ),
        _emulated(
            name="prof_efficiency", title="90 % efficiency in virtual time", points=5,
            draw=emulated.draw_steps, judge=emulated.judge_efficiency, between_ranks=True,
        ),
        Criterion(
            name="prof_scaling", title="speed-up and efficiency, weak and strong", task=_SCALING,
            points=3, world="none", draw=scaling.draw_scaling, observe=scaling.observe_scaling,
            judge=scaling.judge_scaling,
        ),
        Criterion(
            name="prof_report", title="a report that agrees with its log", task=_SCALING,
            points=3, world="none", draw=scaling.draw_report, observe=scaling.observe_report,
            judge=scaling.judge_report,
        ),
        Criterion(
            name="prof_overhead", title="what communication costs in a step", task=_SCALING,
            points=3, draw=scaling.draw_overhead, observe=scaling.observe_overhead,
            judge=scaling.judge_overhead,
        ),
        Criterion(
            name="prof_gpu_efficiency", title="90 % efficiency on real GPUs", task=_BUCKETS,
            points=3, needs="cuda per rank", draw=draw_seeds, observe=gpu.observe, judge=gpu.judge,
            deadline_s=120.0,
        ),
    ),
)  # fmt: skip
