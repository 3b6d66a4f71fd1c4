"""The emulated cluster: PyTorch code runs for real on N processes, and time is simulated.

- `Broker` carries the data of every collective and records what each rank did (`Trace`),
- `emulated_world` makes it a rank's default process group (the torch.distributed backend
  "emulated"),
- `simulate(trace, cluster)` computes the time that this takes on any cluster (`Timeline`),
- `run(fn, nprocs, cluster)` does all of it in one call.

Names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minidist.emulate import clusters
from minidist.emulate.clusters import Cluster, Link
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.simulate import Timeline, simulate
from minidist.emulate.trace import Collective, Event, Trace

if TYPE_CHECKING:
    from minidist.emulate.backend import current_client, emulated_world
    from minidist.emulate.broker import Broker
    from minidist.emulate.client import CollectiveError, CollectiveMismatch
    from minidist.emulate.device import Charged, RooflineDevice
    from minidist.emulate.teach import run

__all__ = [
    "Broker",
    "ChargePlan",
    "Charged",
    "Cluster",
    "Collective",
    "CollectiveError",
    "CollectiveMismatch",
    "Event",
    "Link",
    "PlanChannel",
    "RooflineDevice",
    "Timeline",
    "Trace",
    "clusters",
    "current_client",
    "emulated_world",
    "run",
    "simulate",
]

_LAZY = {
    "Broker": "broker",
    "Charged": "device",
    "CollectiveError": "client",
    "CollectiveMismatch": "client",
    "RooflineDevice": "device",
    "current_client": "backend",
    "emulated_world": "backend",
    "run": "teach",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
