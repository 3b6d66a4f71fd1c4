"""Pipeline parallelism: schedules as data, a simulator, and an executor that runs them for real.

- `schedule`  naive, gpipe, one_f_one_b, pipedream, interleaved, zb_h1; `check` validates a schedule
- `simulate`  timeline, bubble, memory; `draw`
- `program`   when each rank sends and receives, and why this cannot deadlock
- `partition` cut a model into balanced stages; `ties` weights that several stages hold
- `executor`  train a step with any schedule; `backward` splits the backward pass for zero bubble
- `weight_stashing`  PipeDream: asynchronous updates
- `model_parallel`   the naive form, in one process and over ranks
- `native`    torch.distributed.pipelining on the same stages

Example, on p ranks::

    stages = split_model(model, p)
    pipeline = PipelineExecutor(stages[rank], one_f_one_b(p, m), loss_fn)
    result = pipeline.step(inputs, targets)   # gradients are in .grad; the last rank has the loss
    optimizer.step()

`schedule`, `simulate` and `program` need no torch; the other modules are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minidist.parallel.pipeline.check import check_schedule
from minidist.parallel.pipeline.program import make_program
from minidist.parallel.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zb_h1,
)
from minidist.parallel.pipeline.simulate import (
    Span,
    StageTimes,
    Timeline,
    draw,
    peak_activations,
    simulate,
    staleness,
)

if TYPE_CHECKING:
    from minidist.parallel.pipeline.executor import PipelineExecutor
    from minidist.parallel.pipeline.model_parallel import ModelParallel
    from minidist.parallel.pipeline.p2p import TensorSpec
    from minidist.parallel.pipeline.partition import balance, split_model
    from minidist.parallel.pipeline.record import StepResult, gather_timeline
    from minidist.parallel.pipeline.weight_stashing import PipeDreamExecutor, PipeDreamResult

__all__ = [
    "Action",
    "Kind",
    "ModelParallel",
    "PipeDreamExecutor",
    "PipeDreamResult",
    "PipelineExecutor",
    "Schedule",
    "Span",
    "StageTimes",
    "StepResult",
    "TensorSpec",
    "Timeline",
    "balance",
    "check_schedule",
    "draw",
    "forward_only",
    "gather_timeline",
    "gpipe",
    "interleaved",
    "make_program",
    "naive",
    "one_f_one_b",
    "peak_activations",
    "pipedream",
    "simulate",
    "split_model",
    "staleness",
    "zb_h1",
]

_LAZY = {
    "ModelParallel": "model_parallel",
    "PipeDreamExecutor": "weight_stashing",
    "PipeDreamResult": "weight_stashing",
    "PipelineExecutor": "executor",
    "StepResult": "record",
    "TensorSpec": "p2p",
    "balance": "partition",
    "gather_timeline": "record",
    "split_model": "partition",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
