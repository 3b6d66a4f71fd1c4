"""The figure of `--plot`: memory and step time by part, and how the job scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from minidist.cost.hardware import GB
from minidist.cost.search import Candidate, TrainingJob, search
from minidist.cost.step import PARTS
from minidist.plan.answer import Option
from minidist.plan.errors import error_bar
from minidist.plots import new_figure

_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "working")


def scaling(job: TrainingJob) -> list[tuple[int, float, float]]:
    """(GPUs, tokens per second, error bar) of the fastest layout on a quarter to four times the
    GPUs, with the same batch; sizes on which nothing fits are left out."""
    points = []
    for factor in (1 / 4, 1 / 2, 1, 2, 4):
        gpus = job.num_gpus * factor
        if gpus != int(gpus) or gpus < 1:
            continue
        found = search(dataclasses.replace(job, num_gpus=int(gpus)))
        if found.fitting:
            best = min(found.fitting, key=lambda candidate: candidate.step.total_s)
            bar = error_bar(job.model, job.node, best.parallelism, job.dtype, job.offload)
            points.append((int(gpus), best.step.tokens_per_s, bar.relative))
    return points


def save(job: TrainingJob, options: Sequence[Option], file: str) -> None:
    """Draw the three panels into a file whose name says its format (png, svg, pdf).

    Raises:
        ValueError: a format that matplotlib does not know.
    """
    figure, axes = new_figure(width=13, height=4.2)
    axes.remove()
    memory, step, curve = figure.subplots(1, 3)
    names = [_short(option.candidate) for option in options]
    _stack(
        memory,
        names,
        {
            part: [getattr(option.candidate.memory, part) / GB for option in options]
            for part in _MEMORY_PARTS
        },
    )
    memory.axvline(job.node.gpu.memory_bytes / GB, color="black", linestyle="--", linewidth=1)
    memory.set_xlabel("GB per GPU (dashed: its memory)")
    seconds = {
        part: [getattr(option.candidate.step, f"{part}_s") for option in options] for part in PARTS
    }
    _stack(step, names, {part: values for part, values in seconds.items() if any(values)})
    totals = [option.step_s for option in options]
    bars = [option.step_s * option.bar.relative for option in options]
    step.errorbar(totals, range(len(names)), xerr=bars, fmt="none", ecolor="black", capsize=3)
    step.set_xlabel("seconds per step, with error bar")
    points = scaling(job)
    curve.errorbar(
        [gpus for gpus, _, _ in points],
        [rate for _, rate, _ in points],
        yerr=[rate * bar for _, rate, bar in points],
        marker="o",
        capsize=3,
    )
    curve.set_xscale("log", base=2)
    curve.set_yscale("log", base=2)
    curve.set_xticks([gpus for gpus, _, _ in points], [f"{gpus:,}" for gpus, _, _ in points])
    curve.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
    curve.set_xlabel("GPUs, same batch")
    curve.set_ylabel("tokens per second")
    figure.savefig(file, dpi=130)


def _short(candidate: Candidate) -> str:
    p = candidate.parallelism
    axes = {"dp": p.dp, "pp": p.pp, "cp": p.cp, "tp": p.tp, "ep": p.ep, "v": p.virtual_stages}
    words = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
    words += [f"Z{p.zero_stage}" + (f"x{p.replicas}" if p.replicas > 1 else "")]
    return " ".join([*words, f"mb{candidate.micro_batch}"])


def _stack(axes, names: list[str], parts: dict[str, list[float]]) -> None:
    left = [0.0] * len(names)
    for part, values in parts.items():
        axes.barh(range(len(names)), values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    # Above the bars, so that it hides none.
    axes.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
