"""A layout of one's own against the planner's: whether it wins, or why not.

>>> from minidist import cost
>>> from minidist.cost.search import TrainingJob
>>> job = TrainingJob(model=cost.LLAMA2_70B, node=cost.DGX_A100, num_gpus=64, global_batch=256,
...           states=cost.MIXED_ADAM)
>>> challenge(job, "dp=2 pp=4 tp=7").verdict
"does not run: --layout 'dp=2 pp=4 tp=7': dp 2 x pp 4 x cp 1 x tp 7 = 56 GPUs, but --gpus is 64"
>>> challenge(job, "dp=8 tp=8").verdict.split(":")[0]
'does not fit'
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.cost.hardware import GB
from minidist.cost.search import Candidate, TrainingJob, search
from minidist.cost.step import PARTS
from minidist.plan.answer import name_of, priced
from minidist.plan.errors import error_bar
from minidist.plan.inputs import InputError, layout_of

WORDS = {
    "compute": "computing, recomputation included",
    "host": "waiting for the host",
    "tensor": "tensor parallelism's all-reduces",
    "context": "context parallelism's ring",
    "expert": "the all-to-alls of experts",
    "pipeline": "messages between stages",
    "data": "traffic of gradients and shards",
    "bubble": "filling and draining the pipeline",
    "optimizer": "the update",
    "straggler": "waiting for the slowest node",
}


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """A layout beside the planner's.

    Attributes:
        mine: None if the layout does not run at all.
        planner: None if the planner knows no layout that fits.
        verdict: in words, whether the layout wins, and if not, what costs it the time.
    """

    mine: Candidate | None
    planner: Candidate | None
    verdict: str


def challenge(job: TrainingJob, layout: str) -> Challenge:
    """Compare a layout, in the words of `--layout`, with the fastest that the planner finds."""
    fitting = search(job).fitting
    planner = min(fitting, key=lambda candidate: candidate.step.total_s, default=None)
    try:
        mine = priced(job, layout_of(layout))
    except InputError as error:
        return Challenge(mine=None, planner=planner, verdict=f"does not run: {error}")
    if mine.memory.total > job.budget:
        return Challenge(mine=mine, planner=planner, verdict=_too_large(job, mine))
    if planner is None:
        verdict = "wins: it fits, and the planner found nothing that fits"
    else:
        verdict = _compared(job, mine, planner)
    return Challenge(mine=mine, planner=planner, verdict=verdict)


def _too_large(job: TrainingJob, mine: Candidate) -> str:
    memory = mine.memory
    parts = {
        "model states": memory.model_states,
        "activations": memory.activations,
        "working memory": memory.working,
    }
    what = max(parts, key=lambda name: parts[name])
    advice = {
        "model states": "a larger tp or pp, or a higher ZeRO stage, divides them",
        "activations": "recomputation or a smaller micro-batch makes them smaller",
        "working memory": "blocks of this width want a larger tp",
    }
    return (
        f"does not fit: {memory.total / GB:.0f} of {job.budget / GB:.0f} GB; most of it is "
        f"{what}, {parts[what] / GB:.0f} GB: {advice[what]}"
    )


def _compared(job: TrainingJob, mine: Candidate, planner: Candidate) -> str:
    ratio = mine.step.total_s / planner.step.total_s - 1
    if mine.parallelism == planner.parallelism and abs(ratio) < 1e-9:
        return "is the planner's own"
    bars = (
        error_bar(job.model, job.node, one.parallelism, job.dtype, job.offload).relative
        for one in (mine, planner)
    )
    bar = max(bars)
    if ratio < 0:
        tried = ", ".join(map(str, job.micro_batches))
        told = "the error bar of {} makes it a tie" if -ratio <= bar else "the error bar is only {}"
        return (
            f"wins by {-ratio:.1%} over {name_of(planner)}, which is fastest of what the planner "
            f"tries (micro-batches of {tried}, as little recomputation as fits); "
            f"{told.format(f'{bar:.0%}')}"
        )
    worse = {
        name: getattr(mine.step, f"{name}_s") - getattr(planner.step, f"{name}_s") for name in PARTS
    }
    what = max(worse, key=lambda name: worse[name])
    reason = (
        f"most is lost by {WORDS[what]}: {getattr(mine.step, f'{what}_s'):.3g} s, and "
        f"{getattr(planner.step, f'{what}_s'):.3g} s in {name_of(planner)}"
    )
    if ratio <= bar:
        return f"ties: {ratio:.1%} slower, with an error bar of {bar:.0%}; {reason}"
    return f"loses: {ratio:.0%} slower; {reason}"
