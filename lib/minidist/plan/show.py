"""Answers as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from minidist.cost.hardware import GB
from minidist.cost.search import TrainingJob
from minidist.cost.step import PARTS
from minidist.plan.answer import Answer, Option, training_of

if TYPE_CHECKING:  # it needs torch; no other answer does
    from minidist.plan.trace import Expected, Trace

_STEP_WORDS = {
    "compute": "computing, recomputation included",
    "host": "waiting for the host to launch kernels",
    "tensor": "tensor parallelism: all-reduces",
    "context": "context parallelism: keys and values",
    "expert": "expert parallelism: all-to-alls",
    "pipeline": "pipeline: messages between stages",
    "data": "gradients and shards, not hidden",
    "bubble": "pipeline: filling and draining",
    "optimizer": "update, norms, logging",
    "straggler": "waiting for the slowest node",
}
_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "working")


def head_line(job: TrainingJob) -> str:
    """What is planned, in one line."""
    model, node = job.model, job.node
    size = f"{model.num_parameters / 1e9:,.3g}B parameters"
    if model.num_experts:
        size += f" ({model.active_parameters / 1e9:,.3g}B per token)"
    tokens = job.global_batch * model.context
    return (
        f"{size}, context {model.context:,}, on {job.num_gpus:,} GPUs ({node.name}); "
        f"{job.global_batch:,} sequences = {tokens:,} tokens per step; {job.dtype}; "
        f"{job.states.total:g} bytes of state per parameter"
    )


def show_answer(
    console: Console, answer: Answer, *, tokens: float | None, price: float | None
) -> None:
    """The layouts, whether they tie, and what would change the answer."""
    job = answer.job
    console.print(head_line(job))
    for note in answer.notes:
        console.print(f"note: {note}")
    _layout_table(console, job, answer.options, tokens=tokens, price=price)
    best = answer.options[0]
    ties = sum(option.tie for option in answer.options)
    if ties > 1:
        console.print(
            f"The first {ties} are a tie: the model is not better than {best.bar}. "
            "Take the simplest, or measure."
        )
    else:
        console.print(f"Error bar of the first: {best.bar}.")
    console.print(f"What binds: {answer.binding}", soft_wrap=True)
    for change in answer.changes:
        console.print(f"  {change.gain:.0%} less time with {change.what}", soft_wrap=True)


def _layout_table(
    console: Console,
    job: TrainingJob,
    options: tuple[Option, ...],
    *,
    tokens: float | None,
    price: float | None,
) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("layout", overflow="fold")
    for name in ("step", "±", "MFU", "tokens/s/GPU", "GB"):
        table.add_column(name, justify="right")
    if tokens is not None:
        table.add_column("days", justify="right")
        if price is not None:
            table.add_column("$", justify="right")
    for option in options:
        step, memory = option.candidate.step, option.candidate.memory
        fits = "" if memory.total <= job.budget else "!"
        row = [
            "=" if option.tie else "",
            option.name,
            f"{step.total_s:.3g} s",
            f"{option.bar.relative:.0%}",
            f"{step.mfu:.0%}",
            f"{step.tokens_per_s / job.num_gpus:,.0f}",
            f"{memory.total / GB:.0f}{fits}",
        ]
        if tokens is not None:
            run = training_of(option.candidate, job, tokens, price)
            row.append(f"{run['days']:,.1f}")
            if "dollars" in run:
                row.append(f"{run['dollars']:,.0f}")
        table.add_row(*row)
    console.print(table)
    console.print(
        f"= ties with the fastest; a layout may use {job.budget / GB:.0f} of "
        f"{job.node.gpu.memory_bytes / GB:.0f} GB"
        + ("; ! does not fit" if any(not _fits(job, o) for o in options) else "")
    )


def _fits(job: TrainingJob, option: Option) -> bool:
    return option.candidate.memory.total <= job.budget


def show_parts(console: Console, job: TrainingJob, option: Option) -> None:
    """Every second and byte of one layout."""
    console.print(head_line(job))
    console.print(f"{option.name}; software: {job.software_for(option.candidate.parallelism).name}")
    step, memory = option.candidate.step, option.candidate.memory
    seconds = Table(box=None, pad_edge=False)
    for name, side in (("seconds of a step", "left"), ("s", "right"), ("share", "right")):
        seconds.add_column(name, justify=side)  # type: ignore[arg-type]
    for name in PARTS:
        value = getattr(step, f"{name}_s")
        if value:
            seconds.add_row(_STEP_WORDS[name], f"{value:.4g}", f"{value / step.total_s:.1%}")
    seconds.add_row("step", f"{step.total_s:.4g}", "")
    seconds.add_row("communication behind computing", f"{step.hidden_s:.4g}", "hidden")
    console.print(seconds)
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes of the fullest GPU")
    table.add_column("GB", justify="right")
    for name in _MEMORY_PARTS:
        table.add_row(name, f"{getattr(memory, name) / GB:.2f}")
    table.add_row("sum", f"{memory.total / GB:.2f}")
    table.add_row(
        "free for fragmentation, at least", f"{job.node.gpu.memory_bytes * job.reserve / GB:.2f}"
    )
    table.add_row("memory of a GPU", f"{job.node.gpu.memory_bytes / GB:.2f}")
    console.print(table)
    verdict = "fits" if _fits(job, option) else "does not fit"
    console.print(
        f"{verdict}; {step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}; "
        f"error bar {option.bar}"
    )


def show_comparison(
    console: Console,
    job: TrainingJob,
    options: tuple[Option, ...],
    *,
    tokens: float | None,
    price: float | None,
) -> None:
    """Layouts side by side, with the parts that differ."""
    console.print(head_line(job))
    _layout_table(console, job, options, tokens=tokens, price=price)
    table = Table(box=None, pad_edge=False)
    table.add_column("seconds of a step")
    for number in range(1, len(options) + 1):
        table.add_column(str(number), justify="right")
    for name in PARTS:
        values = [getattr(option.candidate.step, f"{name}_s") for option in options]
        if any(values):
            table.add_row(_STEP_WORDS[name], *(f"{value:.3g}" for value in values))
    for name in _MEMORY_PARTS:
        values = [getattr(option.candidate.memory, name) / GB for option in options]
        table.add_row(f"GB of {name}", *(f"{value:.1f}" for value in values))
    console.print(table)


def show_trace(console: Console, found: Trace, sizes: Expected, *, ranks: int) -> None:
    """What rank 0 did, beside what its sizes say."""
    console.print(
        f"rank 0 of {ranks:,}: {found.parameters / 1e9:.3g}B parameters, {found.here:,} here; "
        f"at most {found.peak_bytes / GB:.2f} GB alive (fp32, nothing recomputed); traced in "
        f"{found.seconds:.0f} s"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("collective of one step")
    for name in ("calls", "by the sizes", "bytes", "by the sizes", ""):
        table.add_column(name, justify="right")
    for kind, calls in found.calls.items():
        pair = found.num_bytes[kind], sizes.num_bytes[kind]
        equal = calls == sizes.calls[kind] and pair[0] == pair[1]
        verdict = "equal" if equal else "NOT EQUAL"
        table.add_row(
            kind, str(calls), str(sizes.calls[kind]), f"{pair[0]:,}", f"{pair[1]:,}", verdict
        )
    console.print(table)
