"""Choose how to divide a job over GPUs: the plans that divide and fit, fastest first.

1. Enumerate dp x pp x cp x tp = N over the divisors of N, tp inside a node, the ZeRO stages (only 0
   and 1 with a pipeline), the kinds of recomputation, several micro-batches. Any N works: 6, 7 and
   100 GPUs as well as 64. If no plan divides the batch (1,024 on 100 GPUs), use the nearest
   multiple of N as batch.
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

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from minidist.cost.hardware import Node
from minidist.cost.memory import MIXED_ADAM, Memory, StateBytes, memory_per_gpu
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.step import StepTime, predict_step
from minidist.cost.transformer import Transformer

_RECOMPUTE_ORDER = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run the job that fits into memory, with predicted time and reasons in words."""

    parallelism: ParallelismConfig
    global_batch: int
    micro_batch: int
    num_microbatches: int
    recompute: str
    memory: Memory
    step: StepTime
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.parallelism}, micro-batch {self.micro_batch} x {self.num_microbatches}, "
            f"recompute {self.recompute}: {self.step.total_s:.3g} s, MFU {self.step.mfu:.0%}, "
            f"{self.memory.total / 1e9:.0f} GB"
        )


class NothingFitsError(ValueError):
    """No plan divides and fits. The message has the nearest plan, or why no plan divides."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(100)
    [1, 2, 4, 5, 10, 20, 25, 50, 100]
    """
    if number < 1:
        raise ValueError(f"divisors of a number >= 1, got {number}")
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def parallelisms(
    *, num_gpus: int, gpus_per_node: int, max_cp: int = 1
) -> Iterator[ParallelismConfig]:
    """Every dp x pp x cp x tp with product num_gpus, and every ZeRO stage that is possible.

    tp fits into a node and, if the job is larger than a node, divides the node. ZeRO needs
    dp * cp > 1; with a pipeline only stages 0 and 1 are tried.

    >>> {c.world_size for c in parallelisms(num_gpus=7, gpus_per_node=8)}
    {7}
    """
    # In a job larger than a node, tp must divide the node, so that no tp group spans two nodes.
    for tp in divisors(num_gpus):
        if tp > gpus_per_node or (num_gpus > gpus_per_node and gpus_per_node % tp):
            continue
        for pp in divisors(num_gpus // tp):
            for cp in divisors(num_gpus // (tp * pp)):
                if cp > max_cp:
                    continue
                dp = num_gpus // (tp * pp * cp)
                stages = (0, 1, 2, 3) if pp == 1 else (0, 1)
                for zero_stage in stages if dp * cp > 1 else (0,):
                    yield ParallelismConfig(
                        dp=dp,
                        pp=pp,
                        cp=cp,
                        tp=tp,
                        zero_stage=zero_stage,
                        sequence_parallel=tp > 1,
                    )


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
    launch_s: float = 0.9e-3,
    limit: int = 5,
) -> list[Plan]:
    """The fastest plans, best first, each with its reasons.

    Args:
        num_gpus: any number from 1; every plan uses all GPUs.
        global_batch: sequences of `model.context` tokens per optimiser step. If no plan divides the
            batch, the plans use the nearest multiple of `num_gpus`; their reasons say so.
        reserve: share of the memory that stays free for fragmentation.
        max_cp: largest context-parallel degree to try (long sequences).
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
    budget = node.gpu.memory_bytes * (1 - reserve)
    options = _Options(model, node, num_gpus, states, micro_batches, fused_attention, max_cp)
    plans, refused, nearest = _search(options, global_batch, budget, launch_s)
    if not plans and nearest is None:  # no plan divides: try a different batch
        # The nearest multiple of num_gpus; halves are rounded up; at least one sequence per GPU.
        multiple = max(1, (2 * global_batch + num_gpus) // (2 * num_gpus)) * num_gpus
        plans, _, nearest = _search(options, multiple, budget, launch_s)
    if not plans:
        raise NothingFitsError(_why_nothing(num_gpus, budget, nearest, refused))
    ranked = _rank(plans)[:limit]
    return [_explained(plan, ranked[0], options, global_batch) for plan in ranked]


@dataclass(frozen=True)
class _Options:
    """The settings that all plans share."""

    model: Transformer
    node: Node
    num_gpus: int
    states: StateBytes
    micro_batches: tuple[int, ...]
    fused_attention: bool
    max_cp: int


def _search(
    options: _Options, global_batch: int, budget: float, launch_s: float
) -> tuple[list[Plan], Counter[str], tuple[float, str] | None]:
    """Plans that divide and fit, reasons why plans do not divide, and the smallest plan that
    divides but does not fit (bytes and text)."""
    model, node, states = options.model, options.node, options.states
    num_gpus, max_cp = options.num_gpus, options.max_cp
    fused_attention = options.fused_attention
    plans: list[Plan] = []
    refused: Counter[str] = Counter()
    nearest: tuple[float, str] | None = None
    for p in parallelisms(num_gpus=num_gpus, gpus_per_node=node.num_gpus, max_cp=max_cp):
        for micro_batch in options.micro_batches:
            found = p.problems(model=model, global_batch=global_batch, micro_batch=micro_batch)
            if found:
                refused.update(found[:1])
                continue
            m = p.num_microbatches(global_batch=global_batch, micro_batch=micro_batch)
            for recompute in _RECOMPUTE_ORDER:
                if recompute == "selective" and fused_attention:
                    continue  # the fused kernel recomputes the scores anyway
                memory = memory_per_gpu(
                    model=model,
                    parallelism=p,
                    micro_batch=micro_batch,
                    num_microbatches=m,
                    states=states,
                    recompute=recompute,
                    fused_attention=fused_attention,
                )
                if memory.total > budget:
                    if nearest is None or memory.total < nearest[0]:
                        nearest = memory.total, f"{p}, micro-batch {micro_batch}, {recompute}"
                    continue
                step = predict_step(
                    model=model,
                    parallelism=p,
                    node=node,
                    global_batch=global_batch,
                    micro_batch=micro_batch,
                    states=states,
                    recompute=recompute,
                    fused_attention=fused_attention,
                    dropout=False,
                    launch_s=launch_s,
                )
                plans.append(
                    Plan(
                        parallelism=p,
                        global_batch=global_batch,
                        micro_batch=micro_batch,
                        num_microbatches=m,
                        recompute=recompute,
                        memory=memory,
                        step=step,
                    )
                )
                break  # this plan fits, and more recomputation would only cost time
    return plans, refused, nearest


def _why_nothing(
    num_gpus: int, budget: float, nearest: tuple[float, str] | None, refused: Counter[str]
) -> str:
    if nearest is not None:
        size, plan = nearest
        return (
            f"recommend: nothing fits {num_gpus} GPUs with {budget / 1e9:.0f} GB each; nearest is "
            f"{plan} with {size / 1e9:.0f} GB. More GPUs, offload, or a smaller model"
        )
    reasons = "; ".join(reason for reason, _ in refused.most_common(3))
    return f"recommend: no plan of {num_gpus} GPUs divides: {reasons}"


def _rank(plans: list[Plan]) -> list[Plan]:
    """Sort plans by time, but plans within 2 % of the fastest by simplicity."""

    def simplicity(plan: Plan) -> tuple[int, int, int, float]:
        p = plan.parallelism
        axes = sum(size > 1 for size in (p.pp, p.cp, p.tp))
        return axes, p.zero_stage, _RECOMPUTE_ORDER.index(plan.recompute), plan.step.total_s

    plans = sorted(plans, key=lambda plan: plan.step.total_s)
    limit_s = plans[0].step.total_s * 1.02
    near = [plan for plan in plans if plan.step.total_s <= limit_s]
    return sorted(near, key=simplicity) + plans[len(near) :]


def _explained(plan: Plan, best: Plan, options: _Options, global_batch: int) -> Plan:
    model, node, states = options.model, options.node, options.states
    p, memory, step = plan.parallelism, plan.memory, plan.step
    n, gpu = model.num_parameters, node.gpu
    reasons = [
        f"model states: {n / 1e9:.1f} B parameters x {states.total:g} bytes = "
        f"{n * states.total / 1e9:.0f} GB; one GPU has {gpu.memory_bytes / 1e9:.0f} GB"
    ]
    if plan.global_batch != global_batch:
        reasons.append(
            f"batch {plan.global_batch:,} instead of {global_batch:,}, which no plan of "
            f"{options.num_gpus} GPUs divides; {plan.global_batch:,} = {options.num_gpus} x "
            f"{plan.global_batch // options.num_gpus}"
        )
    if p.tp > 1:
        reasons.append(
            f"tp {p.tp} stays inside a node ({node.num_gpus} GPUs on {node.intra_node.name}); "
            f"{model.num_heads} heads / {p.tp} = {model.num_heads // p.tp} per GPU; "
            f"its all-reduces take {step.tensor_s / step.total_s:.0%} of the step"
        )
    if p.pp > 1:
        reasons.append(
            f"pp {p.pp}: {model.num_layers} layers / {p.pp} = {model.num_layers // p.pp} "
            f"per stage; bubble (p-1)/(m+p-1) = {p.pp - 1}/{plan.num_microbatches + p.pp - 1} = "
            f"{(p.pp - 1) / (plan.num_microbatches + p.pp - 1):.0%} of the step"
        )
    if p.cp > 1:
        reasons.append(f"cp {p.cp}: {model.context} tokens / {p.cp} = {model.context // p.cp} each")
    if p.zero_stage:
        what = ("", "optimiser states", "and gradients", "and parameters")
        reasons.append(
            f"ZeRO-{p.zero_stage} over {p.shard_ranks} ranks (shards "
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
