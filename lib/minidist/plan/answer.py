"""The answer of `minidist plan`: layouts that fit, ties told as ties, and what would change it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from minidist.cost.hardware import GB
from minidist.cost.recommend import NothingFitsError, nearest_batch, why_nothing
from minidist.cost.search import Candidate, Found, Pricer, TrainingJob, search
from minidist.cost.step import PARTS
from minidist.cost.training import DAY_S, cost_dollars, gpu_hours
from minidist.plan.errors import ErrorBar, error_bar
from minidist.plan.inputs import InputError, Layout

# Of 26 published layouts memory is predicted 6 % too small on the mean, and off by 12 %.
RESERVE = 0.14
_WORTH = 0.01  # a change that gains less than this is not shown


@dataclass(frozen=True, kw_only=True)
class Option:
    """One layout with its error bar.

    Attributes:
        tie: whether it is as fast as the fastest, as far as the error bars tell.
    """

    candidate: Candidate
    bar: ErrorBar
    tie: bool

    @property
    def step_s(self) -> float:
        return self.candidate.step.total_s

    @property
    def name(self) -> str:
        return name_of(self.candidate)


def name_of(candidate: Candidate) -> str:
    """A layout in few words: the axes that are larger than 1, and how it runs."""
    p = candidate.parallelism
    axes = {"dp": p.dp, "pp": p.pp, "cp": p.cp, "tp": p.tp, "ep": p.ep}
    words = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
    words += [f"ZeRO-{p.zero_stage}"] if p.zero_stage else []
    words += [f"{p.replicas} replicas"] if p.replicas > 1 else []
    words += [f"{p.virtual_stages} chunks"] if p.virtual_stages > 1 else []
    words += [candidate.schedule] if candidate.schedule != "1f1b" and p.pp > 1 else []
    words.append(f"micro-batch {candidate.micro_batch} x {candidate.num_microbatches}")
    words += [] if candidate.recompute == "none" else [f"{candidate.recompute} recomputation"]
    return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that would make the best layout faster, by `gain` of the step time."""

    what: str
    gain: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Layouts, fastest first, and what would change the order or the time.

    Attributes:
        notes: what was assumed or altered, in words.
    """

    job: TrainingJob
    options: tuple[Option, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """The constraint that binds: the change that gains most."""
        best = self.options[0].candidate
        if self.changes:
            return self.changes[0].what
        share = best.step.compute_s / best.step.total_s
        return f"computing takes {share:.0%} of the step; only faster GPUs would change that"


def options_of(job: TrainingJob, candidates: list[Candidate]) -> tuple[Option, ...]:
    """Candidates with error bars, fastest first; those that the bars do not separate from the
    fastest are ties."""
    ordered = sorted(candidates, key=lambda candidate: candidate.step.total_s)
    options = []
    for candidate in ordered:
        bar = error_bar(job.model, job.node, candidate.parallelism, job.dtype, job.offload)
        best_s = ordered[0].step.total_s
        wide = max(bar.relative, options[0].bar.relative if options else bar.relative)
        tie = candidate.step.total_s <= best_s * (1 + wide)
        options.append(Option(candidate=candidate, bar=bar, tie=tie))
    return tuple(options)


def plan(job: TrainingJob, *, top: int = 5) -> Answer:
    """The fastest layouts of a job.

    Raises:
        NothingFitsError: no layout divides or fits.
    """
    notes = []
    found = search(job)
    if not found.fitting and found.smallest is None and found.forbidden is None:
        batch = nearest_batch(job.num_gpus, job.global_batch)
        notes.append(
            f"no layout of {job.num_gpus:,} GPUs divides a batch of {job.global_batch:,} "
            f"sequences; {batch:,} is the nearest multiple of the GPUs"
        )
        job = dataclasses.replace(job, global_batch=batch)
        found = search(job)
    if not found.fitting:
        if found.forbidden is not None:
            raise NothingFitsError(
                "nothing that fits meets the constraints; without them "
                f"{found.forbidden.parallelism} would take {found.forbidden.step.total_s:.3g} s"
            )
        raise NothingFitsError(why_nothing(job, found))
    best = sorted(found.fitting, key=lambda candidate: candidate.step.total_s)
    options = options_of(job, _different(best)[:top])
    return Answer(
        job=job, options=options, changes=_changes(job, best[0], found), notes=tuple(notes)
    )


def _different(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest of all layouts that differ only in micro-batch, chunks or copies of shards."""
    kept: dict[tuple[Any, ...], Candidate] = {}
    for candidate in candidates:
        p = candidate.parallelism
        kept.setdefault((p.dp, p.pp, p.cp, p.tp, p.ep, p.zero_stage), candidate)
    return list(kept.values())


def _changes(job: TrainingJob, best: Candidate, found: Found) -> tuple[Change, ...]:
    """What would make the answer faster, the most effective first."""
    changes = []
    now_s = best.step.total_s

    def add(what: str, step_s: float) -> None:
        if (gain := 1 - step_s / now_s) >= _WORTH:
            changes.append(Change(what=what, gain=gain))

    if (large := found.too_large) is not None:
        add(
            f"memory: {large.memory.total / (1 - job.reserve) / GB:.0f} GB per GPU instead of "
            f"{job.node.gpu.memory_bytes / GB:.0f}, which would allow {name_of(large)}",
            large.step.total_s,
        )
    if (other := found.forbidden) is not None:
        add(f"other constraints: without them {name_of(other)} is allowed", other.step.total_s)
    for what, node in (
        ("a network twice as fast", {"network": job.node.network.times(2)}),
        ("links inside the node twice as fast", {"intra_node": job.node.intra_node.times(2)}),
    ):
        faster = dataclasses.replace(job, node=dataclasses.replace(job.node, **node))
        again = Pricer(faster).price(
            best.parallelism, best.micro_batch, best.num_microbatches, best.recompute
        )
        add(what, again.step.total_s)
    twice = Pricer(job).price(
        best.parallelism, best.micro_batch, 2 * best.num_microbatches, best.recompute
    )
    add("a batch twice as large, per token: less waiting per step", twice.step.total_s / 2)
    return tuple(sorted(changes, key=lambda change: -change.gain))


def priced(job: TrainingJob, layout: Layout) -> Candidate:
    """The memory and step of one layout that a user named; it may not fit.

    Raises:
        InputError: the layout has other GPUs than the job, or sizes that do not divide.
    """
    p = layout.parallelism
    if p.world_size != job.num_gpus:
        raise InputError(
            f"--layout {layout.text!r}: dp {p.dp} x pp {p.pp} x cp {p.cp} x tp {p.tp} = "
            f"{p.world_size} GPUs, but --gpus is {job.num_gpus}"
        )
    found = p.problems(
        model=job.model,
        global_batch=job.global_batch,
        micro_batch=layout.micro_batch,
        even_stages=job.even_stages,
    )
    if found:
        raise InputError(f"--layout {layout.text!r}: " + "; ".join(found))
    m = p.num_microbatches(global_batch=job.global_batch, micro_batch=layout.micro_batch)
    job = dataclasses.replace(job, schedule=layout.schedule or job.schedule)
    return Pricer(job).price(p, layout.micro_batch, m, layout.recompute)


def as_dict(option: Option, job: TrainingJob, *, tokens: float | None, price: float | None) -> dict:
    """An option with every second and byte by part, for --json."""
    candidate, p = option.candidate, option.candidate.parallelism
    step, memory = candidate.step, candidate.memory
    row: dict[str, Any] = {
        "layout": {
            **{axis: getattr(p, axis) for axis in ("dp", "pp", "cp", "tp", "ep")},
            "zero": p.zero_stage,
            "replicas": p.replicas,
            "sequence_parallel": p.sequence_parallel,
            "chunks": p.virtual_stages,
            "schedule": candidate.schedule,
            "micro_batch": candidate.micro_batch,
            "micro_batches": candidate.num_microbatches,
            "recompute": candidate.recompute,
            "software": job.software_for(p).name,
        },
        "step_s": step.total_s,
        "step_s_low": step.total_s * (1 - option.bar.relative),
        "step_s_high": step.total_s * (1 + option.bar.relative),
        "error_bar": {
            "relative": option.bar.relative,
            "rows": option.bar.rows,
            "kind": option.bar.kind,
            "note": option.bar.note,
        },
        "tie_with_fastest": option.tie,
        "seconds": {name: getattr(step, f"{name}_s") for name in PARTS},
        "hidden_s": step.hidden_s,
        "tokens_per_s": step.tokens_per_s,
        "tokens_per_s_per_gpu": step.tokens_per_s / job.num_gpus,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "bytes": {
            name: getattr(memory, name)
            for name in ("parameters", "gradients", "optimizer", "activations", "working")
        },
        "total_bytes": memory.total,
        "budget_bytes": job.budget,
        "fits": memory.total <= job.budget,
    }
    if tokens is not None:
        row |= training_of(candidate, job, tokens, price)
    return row


def training_of(
    candidate: Candidate, job: TrainingJob, tokens: float, price: float | None
) -> dict[str, float]:
    """Days, GPU hours and dollars of a whole run."""
    seconds = tokens / candidate.step.tokens_per_s
    hours = gpu_hours(seconds=seconds, num_gpus=job.num_gpus)
    row = {"days": seconds / DAY_S, "gpu_hours": hours}
    if price is not None:
        row["dollars"] = cost_dollars(gpu_hours=hours, dollars_per_gpu_hour=price)
    return row
