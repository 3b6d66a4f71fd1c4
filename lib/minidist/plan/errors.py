"""The error bar of a prediction: how far off the model is on held-back published runs of its kind.

>>> from minidist import cost
>>> bar = error_bar(cost.LLAMA3_70B, cost.DGX_H100, cost.ParallelismConfig(dp=64, zero_stage=3))
>>> 0 < bar.relative < 0.3 and bar.rows >= 6
True
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from minidist.cost.hardware import Node
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.transformer import Transformer
from minidist.plan.runs import Run, error_of, load_runs

_QUANTILE = 0.8
_FEWEST = 6  # rows that a quantile needs
_SMALL = 2e9  # parameters below which launches of kernels matter
_UNKNOWN = 2.0  # by how much the bar of a related kind is widened


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Relative error that four of five held-back rows of a kind stay within.

    Attributes:
        rows, kind: how many rows, and of what.
        note: why the bar is wider than the rows say; empty if it is not.
    """

    relative: float
    rows: int
    kind: str
    note: str = ""

    def __str__(self) -> str:
        text = f"±{self.relative:.0%}, from {self.rows} held-back runs: {self.kind}"
        return f"{text}; {self.note}" if self.note else text


@functools.cache
def _held_back() -> tuple[Run, ...]:
    return tuple(run for run in load_runs() if run.split == "test")


@functools.cache
def _error(run: Run) -> float:
    return abs(error_of(run))


def _traits(model: Transformer, node: Node, p: ParallelismConfig, dtype: str) -> tuple[str, ...]:
    """What decides the kind of a plan, the most important first."""
    if p.zero_stage >= 2:
        split = "parameters or gradients sharded"
    elif p.pp > 1:
        split = "pipeline"
    else:
        split = "tensor parallel" if p.tp > 1 else "replicas"
    return (
        node.gpu.name.split()[0],
        "fp8" if dtype == "fp8" else "16 bit",
        split,
        "many nodes" if p.world_size > node.num_gpus else "one node",
        "small models" if model.num_parameters < _SMALL else "large models",
    )


@functools.cache
def error_bar(
    model: Transformer,
    node: Node,
    parallelism: ParallelismConfig,
    dtype: str = "bf16",
    offload: bool = False,
) -> ErrorBar:
    """The error bar of the step time of a plan, from the narrowest kind that has enough rows.

    A dense model uses rows of dense models, a model with experts all rows with experts. The bar is
    doubled where no such rows are held back: for offload, and for a GPU generation that has too few
    rows, which uses those of the H100.
    """
    traits = _traits(model, node, parallelism, dtype)
    experts = model.num_experts > 0
    pool = [run for run in _held_back() if (run.model.num_experts > 0) == experts]
    here = sum(run.node.gpu.name.split()[0] == traits[0] for run in pool)
    unknown = []
    if experts:
        if not here:
            unknown.append(f"no run with experts on {traits[0]} is held back, so it is doubled")
        traits = ()
    elif here < _FEWEST:
        runs = {0: "no run", 1: "one run"}.get(here, f"{here} runs")
        unknown.append(f"{runs} on {traits[0]} held back, so it is the H100's doubled")
        traits = ("H100", *traits[1:])
    if offload:
        unknown.append("no run with offload is among the rows, so it is doubled")
    found: list[Run] = []
    kind: tuple[str, ...] = ()
    for length in range(len(traits), -1, -1):
        kind = traits[:length]
        found = [
            run
            for run in pool
            if _traits(run.model, run.node, run.parallelism, run.dtype)[:length] == kind
        ]
        if len(found) >= _FEWEST:
            break
    errors = sorted(_error(run) for run in found)
    relative = errors[min(len(errors) - 1, int(_QUANTILE * len(errors)))]
    return ErrorBar(
        relative=relative * _UNKNOWN ** len(unknown),
        rows=len(found),
        kind="with experts" if experts else ", ".join(kind) or "all",
        note="; ".join(unknown),
    )
