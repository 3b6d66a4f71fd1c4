"""Measure where time, memory and bandwidth go. The tools do not change what they measure.

    timeline      each rank's work over time: one format, Chrome/Perfetto export
    trace         timelines from torch.profiler, on gloo and on GPUs
    overlap       compute, exposed and overlapped communication, bubble, of a step
    memory        parameters, gradients, optimiser state, activations over a step
    loader        time that the loop waits for data      loader_settings  settings that are enough
    stragglers    late ranks, and their cost             monitor, readers  GPU use, memory, power
    scaling       strong and weak scaling                paired           DDP and plain training
    interconnect  latency and bandwidth between ranks    topology         links between devices
    nccl          environment variables explained        flight           missing ranks in a hang

Example: a DDP step on gloo, and where its time went::

    with torch.profiler.profile() as profile:
        for _ in range(3):
            with torch.profiler.record_function("step"):
                train_step()
    timeline = gather_timeline(from_profiler(profile, step="step"))   # on all ranks
    print(report(timeline))
    save_chrome_trace(timeline, "trace.json")                         # open in ui.perfetto.dev

Names that need torch are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minidist.profile.flight import (
    dump_on_hang,
    explain_hang,
    find_mismatches,
    find_stuck,
    read_dumps,
    take_dump,
    write_dump,
)
from minidist.profile.loader import LoaderReport, WatchedLoader
from minidist.profile.loader_settings import (
    LoaderSettings,
    SettingsRow,
    compare_settings,
    cores_per_rank,
    suggest,
)
from minidist.profile.monitor import Monitor
from minidist.profile.nccl import explain, find_dangers
from minidist.profile.nccl_settings import SETTINGS, Setting
from minidist.profile.overlap import Shares, find_bottleneck, report, shares, step_shares, total
from minidist.profile.paired import OverheadRow, measure_overhead, overhead_rows
from minidist.profile.readers import Reading, choose_reader
from minidist.profile.scaling import ScalingRow, measure_scaling, scaling_rows
from minidist.profile.stragglers import (
    ArrivalTimer,
    StragglerReport,
    compute_rows,
    find_stragglers,
    gather_rows,
)
from minidist.profile.timeline import (
    Span,
    Timeline,
    Window,
    chrome_trace,
    from_emulated,
    from_pipeline,
    gather_timeline,
    merge_timelines,
    save_chrome_trace,
)
from minidist.profile.topology import gpu_topology, host_topology, parse_topo
from minidist.profile.trace import from_chrome_trace, from_profiler, read_trace

if TYPE_CHECKING:
    from minidist.profile.interconnect import (
        CollectiveRow,
        PairRow,
        fit_collective,
        measure_collectives,
        measure_pairs,
        pair_table,
    )
    from minidist.profile.memory import MemoryRow, MemoryTracker, native_peak_bytes

__all__ = [
    "SETTINGS",
    "ArrivalTimer",
    "CollectiveRow",
    "LoaderReport",
    "LoaderSettings",
    "MemoryRow",
    "MemoryTracker",
    "Monitor",
    "OverheadRow",
    "PairRow",
    "Reading",
    "ScalingRow",
    "Setting",
    "SettingsRow",
    "Shares",
    "Span",
    "StragglerReport",
    "Timeline",
    "WatchedLoader",
    "Window",
    "choose_reader",
    "chrome_trace",
    "compare_settings",
    "compute_rows",
    "cores_per_rank",
    "dump_on_hang",
    "explain",
    "explain_hang",
    "find_bottleneck",
    "find_dangers",
    "find_mismatches",
    "find_stragglers",
    "find_stuck",
    "fit_collective",
    "from_chrome_trace",
    "from_emulated",
    "from_pipeline",
    "from_profiler",
    "gather_rows",
    "gather_timeline",
    "gpu_topology",
    "host_topology",
    "measure_collectives",
    "measure_overhead",
    "measure_pairs",
    "measure_scaling",
    "merge_timelines",
    "native_peak_bytes",
    "overhead_rows",
    "pair_table",
    "parse_topo",
    "read_dumps",
    "read_trace",
    "report",
    "save_chrome_trace",
    "scaling_rows",
    "shares",
    "step_shares",
    "suggest",
    "take_dump",
    "total",
    "write_dump",
]

_LAZY = {
    "CollectiveRow": "interconnect",
    "MemoryRow": "memory",
    "MemoryTracker": "memory",
    "PairRow": "interconnect",
    "fit_collective": "interconnect",
    "measure_collectives": "interconnect",
    "measure_pairs": "interconnect",
    "native_peak_bytes": "memory",
    "pair_table": "interconnect",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
