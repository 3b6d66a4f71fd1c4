"""Choose how to divide a job over GPUs: the plans that divide and fit, fastest first.

1. Enumerate dp x pp x cp x tp = N over the divisors of N, tp inside a node, the ZeRO stages (only 0
   and 1 with a pipeline), chunks of layers per stage, expert-parallel groups, the kinds of
   recomputation, several micro-batches (`minidist.cost.search`). Any N works: 6, 7 and 100 GPUs as
   well as 64. If no plan divides the batch (1,024 on 100 GPUs), use the nearest multiple of N.
2. Drop plans that do not divide (heads by tp, layers by pp, batch by dp), and remember why.
3. Drop plans that do not fit into the GPU's memory (`minidist.cost.memory`).
4. Predict the step time of the remaining plans (`minidist.cost.step`) and sort. Among plans within
   2 % of the fastest, the simplest plan is first: fewest parallel axes, lowest ZeRO stage, least
   recomputation.

Example: 13 billion parameters on two DGX A100.

>>> from minidist.cost.hardware import DGX_A100
>>> from minidist.cost.transformer import LLAMA2_13B
>>> best = recommend(model=LLAMA2_13B, node=DGX_A100, num_gpus=16, global_batch=128)[0]
>>> best.parallelism.world_size, best.memory.total < 80e9
(16, True)
>>> print(best.reasons[0])
model states: 13.0 B parameters x 16 bytes = 208 GB; one GPU has 80 GB
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidist.cost.hardware import Node
from minidist.cost.memory import MIXED_ADAM, StateBytes
from minidist.cost.search import RECOMPUTE_ORDER, Candidate, Found, TrainingJob, search
from minidist.cost.software import Software
from minidist.cost.transformer import Transformer

_EXPLAINED = 200  # plans for which reasons are written


@dataclass(frozen=True, kw_only=True)
class Plan(Candidate):
    """One way to run the job that fits into memory, with predicted time and reasons in words."""

    global_batch: int
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.parallelism}, micro-batch {self.micro_batch} x {self.num_microbatches}, "
            f"recompute {self.recompute}: {self.step.total_s:.3g} s, MFU {self.step.mfu:.0%}, "
            f"{self.memory.total / 1e9:.0f} GB"
        )


class NothingFitsError(ValueError):
    """No plan divides and fits. The message has the nearest plan, or why no plan divides."""


def recommend(
    *,
    model: Transformer,
    node: Node,
    num_gpus: int,
    global_batch: int,
    states: StateBytes = MIXED_ADAM,
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16),
    fused_attention: bool = True,
    max_cp: int = 1,
    reserve: float = 0.05,
    launch_s: float | None = None,
    software: Software | None = None,
    limit: int = 5,
) -> list[Plan]:
    """The fastest plans, best first, each with its reasons.

    Args:
        num_gpus: any number from 1; every plan uses all GPUs.
        global_batch: sequences of `model.context` tokens per optimiser step. If no plan divides the
            batch, the plans use the nearest multiple of `num_gpus`; their reasons say so.
        reserve: share of the memory that stays free for fragmentation.
        max_cp: largest context-parallel degree to try (long sequences).
        launch_s, software: as in `predict_step`.
        limit: how many plans to return.

    Raises:
        NothingFitsError: no plan divides, or no plan fits; the message has the nearest plan with
            its memory, or the reasons.
    """
    if num_gpus < 1 or global_batch < 1 or not 0 <= reserve < 1:
        raise ValueError(
            "recommend: needs num_gpus >= 1, global_batch >= 1, 0 <= reserve < 1, got "
            f"{num_gpus}, {global_batch}, {reserve}"
        )
    job = TrainingJob(
        model=model,
        node=node,
        num_gpus=num_gpus,
        global_batch=global_batch,
        states=states,
        micro_batches=micro_batches,
        fused_attention=fused_attention,
        max_cp=max_cp,
        reserve=reserve,
        launch_s=launch_s,
        software=software,
    )
    found = search(job)
    if not found.fitting and found.smallest is None:  # no plan divides: try a different batch
        job = replace(job, global_batch=nearest_batch(num_gpus, global_batch))
        found = search(job)
    if not found.fitting:
        raise NothingFitsError(f"recommend: {why_nothing(job, found)}")
    return ranked_plans(job, found, global_batch)[:limit]


def ranked_plans(job: TrainingJob, found: Found, global_batch: int) -> list[Plan]:
    """The layouts that fit as plans, best first, each with its reasons.

    Args:
        global_batch: the batch that was asked for; `job` may have the nearest one that divides.
    """
    plans = [Plan(**vars(each), global_batch=job.global_batch) for each in found.fitting]
    ranked = _rank(plans)[:_EXPLAINED]
    return [_explained(plan, ranked[0], job, global_batch) for plan in ranked]


def nearest_batch(num_gpus: int, global_batch: int) -> int:
    """The nearest multiple of num_gpus; halves are rounded up; at least one sequence per GPU."""
    return max(1, (2 * global_batch + num_gpus) // (2 * num_gpus)) * num_gpus


def why_nothing(job: TrainingJob, found: Found) -> str:
    """Why a search found no layout: the one with the least memory, or what does not divide."""
    if (nearest := found.smallest) is not None:
        return (
            f"nothing fits {job.num_gpus} GPUs with {job.budget / 1e9:.0f} GB each; "
            f"nearest is {nearest.parallelism}, micro-batch {nearest.micro_batch}, "
            f"{nearest.recompute} with {nearest.memory.total / 1e9:.0f} GB. More GPUs, offload, or "
            "a smaller model"
        )
    reasons = "; ".join(reason for reason, _ in found.refused.most_common(3))
    return f"no plan of {job.num_gpus} GPUs divides: {reasons}"


def _rank(plans: list[Plan]) -> list[Plan]:
    """Sort plans by time, but plans within 2 % of the fastest by simplicity."""

    def simplicity(plan: Plan) -> tuple[int, int, int, float]:
        p = plan.parallelism
        axes = sum(size > 1 for size in (p.pp, p.cp, p.tp, p.ep))
        return (
            axes,
            p.zero_stage + (p.replicas > 1),
            RECOMPUTE_ORDER.index(plan.recompute),
            plan.step.total_s,
        )

    plans = sorted(plans, key=lambda plan: plan.step.total_s)
    limit_s = plans[0].step.total_s * 1.02
    near = [plan for plan in plans if plan.step.total_s <= limit_s]
    return sorted(near, key=simplicity) + plans[len(near) :]


def _bubble(plan: Plan) -> str:
    p, m, v = plan.parallelism.pp, plan.num_microbatches, plan.parallelism.virtual_stages
    if v == 1:
        return (
            f"bubble (p-1)/(m+p-1) = {p - 1}/{m + p - 1} = {(p - 1) / (m + p - 1):.0%} of the step"
        )
    share = (p - 1) / (v * m + p - 1)
    return (
        f"in {v} chunks; bubble (p-1)/(v m+p-1) = {p - 1}/{v * m + p - 1} = {share:.0%} of the step"
    )


def _explained(plan: Plan, best: Plan, job: TrainingJob, global_batch: int) -> Plan:
    model, node, states = job.model, job.node, job.states
    p, memory, step = plan.parallelism, plan.memory, plan.step
    n, gpu = model.num_parameters, node.gpu
    reasons = [
        f"model states: {n / 1e9:.1f} B parameters x {states.total:g} bytes = "
        f"{n * states.total / 1e9:.0f} GB; one GPU has {gpu.memory_bytes / 1e9:.0f} GB"
    ]
    if plan.global_batch != global_batch:
        reasons.append(
            f"batch {plan.global_batch:,} instead of {global_batch:,}, which no plan of "
            f"{job.num_gpus} GPUs divides; {plan.global_batch:,} = {job.num_gpus} x "
            f"{plan.global_batch // job.num_gpus}"
        )
    if p.tp > 1:
        reasons.append(
            f"tp {p.tp} stays inside a node ({node.num_gpus} GPUs on {node.intra_node.name}); "
            f"{model.num_heads} heads / {p.tp} = {model.num_heads // p.tp} per GPU; "
            f"its all-reduces take {step.tensor_s / step.total_s:.0%} of the step"
        )
    if p.pp > 1:
        reasons.append(
            f"pp {p.pp}: {model.num_layers} layers / {p.pp} = {model.num_layers / p.pp:.3g} "
            f"per stage; {_bubble(plan)}"
        )
    if p.cp > 1:
        reasons.append(f"cp {p.cp}: {model.context} tokens / {p.cp} = {model.context // p.cp} each")
    if p.zero_stage:
        what = ("", "optimiser states", "and gradients", "and parameters")
        reasons.append(
            f"ZeRO-{p.zero_stage} over {p.zero_ranks} ranks (shards "
            f"{' '.join(what[1 : p.zero_stage + 1])}): {memory.model_states / 1e9:.1f} GB of model "
            "states per GPU"
        )
    reasons.append(
        f"memory: {memory.model_states / 1e9:.1f} GB states + {memory.activations / 1e9:.1f} GB "
        f"activations + {memory.working / 1e9:.1f} GB working = {memory.total / 1e9:.1f} of "
        f"{gpu.memory_bytes / 1e9:.0f} GB"
    )
    if plan.recompute != "none":
        reasons.append(f"{plan.recompute} recomputation, since the activations do not fit without")
    lost = [
        f"{name} {share:.0%}"
        for name, share in step.shares().items()
        if name != "compute" and share >= 0.01
    ]
    reasons.append(
        f"step {step.total_s:.3g} s = {step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.0%}; "
        f"not computing: {', '.join(lost) or 'less than 1 %'}"
    )
    if plan is not best:
        reasons.append(
            f"{step.total_s / best.step.total_s:.2f} times the time of {best.parallelism}"
        )
    return replace(plan, reasons=tuple(reasons))
