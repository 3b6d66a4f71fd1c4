"""Every layout of a job that divides, with its memory and its step: what `recommend` ranks.

dp x pp x cp x tp = N over the divisors of N, tp inside a node; ZeRO stages (only 0 and 1 with a
pipeline), ZeRO-3 also in copies that take 1, 2, 4, ... nodes each (HSDP); chunks of layers per
stage; expert-parallel groups; micro-batches; recomputation, as little as fits. What many layouts
share (a block's time, the sizes that divide) is computed once, so 16,384 GPUs take a fraction of a
second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from minidist.cost.block import BlockTime, block_seconds
from minidist.cost.hardware import Node
from minidist.cost.memory import Memory, StateBytes, memory_per_gpu
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.software import Software, usual_software
from minidist.cost.step import StepTime, step_of_blocks
from minidist.cost.transformer import Transformer

_GAIN = 0.01  # of the step, below which copies of shards are not worth their memory
RECOMPUTE_ORDER = ("none", "selective", "full")


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
    dp * cp > 1; with a pipeline only stages 0 and 1 are tried. Chunks and experts are left to
    `candidates`.

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


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is to be trained, where and how: everything that all layouts share.

    Attributes:
        software: None takes what is usual for the layout.
        allowed: a layout for which this is False is left out.
        reserve: share of the memory that stays free for fragmentation.
        even_stages: False also takes layers that do not divide by the stages.
        schedule: of the pipeline: 1f1b (with chunks: interleaved), zb_h1, zb_h2.
    """

    model: Transformer
    node: Node
    num_gpus: int
    global_batch: int
    states: StateBytes
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    fused_attention: bool = True
    dropout: bool = False
    max_cp: int = 1
    reserve: float = 0.05
    dtype: str = "bf16"
    software: Software | None = None
    launch_s: float | None = None
    offload: bool = False
    even_stages: bool = True
    schedule: str = "1f1b"
    allowed: Callable[[ParallelismConfig], bool] | None = None

    @property
    def budget(self) -> float:
        return self.node.gpu.memory_bytes * (1 - self.reserve)

    def software_for(self, p: ParallelismConfig) -> Software:
        software = self.software or usual_software(p.zero_stage)
        return software if self.launch_s is None else replace(software, launch_s=self.launch_s)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that divides, with its memory and step; it may not fit."""

    parallelism: ParallelismConfig
    micro_batch: int
    num_microbatches: int
    recompute: str
    memory: Memory
    step: StepTime
    schedule: str = "1f1b"


@dataclass
class Found:
    """What a search found.

    Attributes:
        fitting: layouts that fit the memory.
        too_large: the fastest layout that needs at most twice the memory that there is.
        smallest: of the layouts that do not fit, the one with the least memory.
        forbidden: the fastest fitting layout that `TrainingJob.allowed` leaves out.
        refused: why layouts do not divide, counted.
    """

    fitting: list[Candidate] = field(default_factory=list)
    too_large: Candidate | None = None
    smallest: Candidate | None = None
    forbidden: Candidate | None = None
    refused: Counter[str] = field(default_factory=Counter)


class Pricer:
    """Memory and step of layouts of one job; blocks that layouts share are computed once."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._blocks: dict[tuple, BlockTime] = {}

    def memory(self, p: ParallelismConfig, micro_batch: int, m: int, recompute: str) -> Memory:
        job = self.job
        return memory_per_gpu(
            model=job.model,
            parallelism=p,
            micro_batch=micro_batch,
            num_microbatches=m,
            states=job.states,
            recompute=recompute,
            fused_attention=job.fused_attention,
            dropout=job.dropout,
            offload=job.offload,
            schedule=job.schedule,
        )

    def price(
        self,
        p: ParallelismConfig,
        micro_batch: int,
        m: int,
        recompute: str,
        memory: Memory | None = None,
    ) -> Candidate:
        """The layout with its memory, if that is not known yet, and its step."""
        job = self.job
        memory = memory or self.memory(p, micro_batch, m, recompute)
        software = job.software_for(p)
        key = (p.tp, p.cp, p.ep, p.sequence_parallel, micro_batch, recompute, software.name)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = block_seconds(
                model=job.model,
                parallelism=p,
                node=job.node,
                micro_batch=micro_batch,
                software=software,
                recompute=recompute,
                fused_attention=job.fused_attention,
                dropout=job.dropout,
                dtype=job.dtype,
            )
        step = step_of_blocks(
            block,
            model=job.model,
            parallelism=p,
            node=job.node,
            micro_batch=micro_batch,
            num_microbatches=m,
            states=job.states,
            recompute=recompute,
            dtype=job.dtype,
            software=software,
            schedule=job.schedule,
            offload=job.offload,
        )
        return Candidate(
            parallelism=p,
            micro_batch=micro_batch,
            num_microbatches=m,
            recompute=recompute,
            memory=memory,
            step=step,
            schedule=job.schedule,
        )


def _expert_groups(model: Transformer, p: ParallelismConfig) -> list[int]:
    if not model.num_experts:
        return [1]
    return [ep for ep in divisors(model.num_experts) if p.dp * p.cp * p.tp % ep == 0]


def _replicas(node: Node, p: ParallelismConfig) -> list[int]:
    """Copies of the shards: 1, and with ZeRO-3 as many that a copy takes 1, 2, 4, ... nodes."""
    found = [1]
    ranks = max(1, node.num_gpus // p.tp)
    while p.zero_stage == 3 and 2 * ranks <= p.shard_ranks:
        if p.shard_ranks % ranks == 0:
            found.append(p.shard_ranks // ranks)
        ranks *= 2
    return found


def _chunks(job: TrainingJob, p: ParallelismConfig, m: int) -> list[int]:
    """Chunks per stage: 1, and with m a multiple of pp every divisor of the layers per stage."""
    if p.pp == 1 or m % p.pp or job.schedule != "1f1b":
        return [1]
    most = -(-job.model.num_layers // p.pp)
    return [v for v in divisors(most) if p.pp * v <= job.model.num_layers + 2]


def candidates(
    job: TrainingJob, refused: Counter[str]
) -> Iterator[tuple[ParallelismConfig, int, int]]:
    """(layout, micro-batch, micro-batches per step) of everything that divides; why the rest does
    not is counted in `refused`."""
    for base in parallelisms(
        num_gpus=job.num_gpus, gpus_per_node=job.node.num_gpus, max_cp=job.max_cp
    ):
        if found := base.problems(model=job.model, even_stages=job.even_stages):
            refused.update(found[:1])
            continue
        for micro_batch in job.micro_batches:
            m, left = divmod(job.global_batch, base.dp * micro_batch)
            if left or not m:
                found = base.problems(
                    model=job.model,
                    global_batch=job.global_batch,
                    micro_batch=micro_batch,
                    even_stages=job.even_stages,
                )
                refused.update(found[:1])
                continue
            for chunks in _chunks(job, base, m):
                for ep in _expert_groups(job.model, base):
                    for replicas in _replicas(job.node, base) if ep == 1 else [1]:
                        changes = {"virtual_stages": chunks, "ep": ep, "replicas": replicas}
                        plain = chunks == ep == replicas == 1
                        yield base if plain else replace(base, **changes), micro_batch, m


def _worth_their_copies(fitting: list[Candidate]) -> list[Candidate]:
    """Without layouts whose copies of shards gain less than `_GAIN` of the step."""
    plain = {
        (c.parallelism, c.micro_batch): c.step.total_s
        for c in fitting
        if c.parallelism.replicas == 1
    }

    def gains(c: Candidate) -> bool:
        alone_s = plain.get((replace(c.parallelism, replicas=1), c.micro_batch))
        return alone_s is None or c.step.total_s < alone_s * (1 - _GAIN)

    return [c for c in fitting if c.parallelism.replicas == 1 or gains(c)]


def search(job: TrainingJob) -> Found:
    """Every layout of the job, each with the least recomputation with which it fits; copies of
    shards (HSDP) only where they make the step shorter."""
    found = Found()
    pricer = Pricer(job)
    budget = job.budget
    for p, micro_batch, m in candidates(job, found.refused):
        allowed = job.allowed is None or job.allowed(p)
        for recompute in RECOMPUTE_ORDER:
            if recompute == "selective" and job.fused_attention:
                continue  # the fused kernel recomputes the scores anyway
            memory = pricer.memory(p, micro_batch, m, recompute)
            least = found.smallest.memory.total if found.smallest else math.inf
            if memory.total > 2 * budget and (not allowed or memory.total >= least):
                continue  # no caller needs its step
            candidate = pricer.price(p, micro_batch, m, recompute, memory)
            if memory.total <= budget:
                # More recomputation would only cost time.
                if allowed:
                    found.fitting.append(candidate)
                elif _faster(candidate, found.forbidden):
                    found.forbidden = candidate
                break
            if not allowed:
                continue
            if memory.total <= 2 * budget and _faster(candidate, found.too_large):
                found.too_large = candidate
            if memory.total < least:
                found.smallest = candidate
    found.fitting = _worth_their_copies(found.fitting)
    return found


def _faster(one: Candidate, other: Candidate | None) -> bool:
    return other is None or one.step.total_s < other.step.total_s
