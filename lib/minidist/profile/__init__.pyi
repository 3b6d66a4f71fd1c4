from .flight import (
    dump_on_hang,
    explain_hang,
    find_mismatches,
    find_stuck,
    read_dumps,
    take_dump,
    write_dump,
)
from .interconnect import (
    CollectiveRow,
    PairRow,
    fit_collective,
    measure_collectives,
    measure_pairs,
)
from .loader import LoaderReport, WatchedLoader
from .loader_settings import LoaderSettings, SettingsRow, compare_settings, cores_per_rank, suggest
from .memory import MemoryRow, MemoryTracker
from .monitor import Monitor
from .nccl import explain, find_dangers
from .nccl_settings import SETTINGS, Setting
from .overlap import Shares, find_bottleneck, report, shares, step_shares, total
from .paired import OverheadRow, measure_overhead, overhead_rows
from .readers import Reading, choose_reader
from .scaling import ScalingRow, measure_scaling, scaling_rows
from .stragglers import ArrivalTimer, StragglerReport, compute_rows, find_stragglers, gather_rows
from .timeline import (
    Span,
    Timeline,
    Window,
    chrome_trace,
    from_emulated,
    gather_timeline,
    merge_timelines,
    save_chrome_trace,
)
from .topology import parse_topo
from .trace import from_chrome_trace, from_profiler, read_trace

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
    "from_profiler",
    "gather_rows",
    "gather_timeline",
    "measure_collectives",
    "measure_overhead",
    "measure_pairs",
    "measure_scaling",
    "merge_timelines",
    "overhead_rows",
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
