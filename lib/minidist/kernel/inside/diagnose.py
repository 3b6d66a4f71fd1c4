"""What this rank's main thread is doing, for the text that explains a hang.

Two sources: the Python frames of the main thread (which cell, which line, which collective, and the
tensor in the collective's local variables), and torch's flight recorder (how many collectives were
started and which are not done). The recorder covers torch's own backends only; frames cover every
backend.
"""

from __future__ import annotations

import linecache
import resource
import sys
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

from minidist.kernel.inside.programs import program
from minidist.processes.last_calls import entry_text, last_calls, recorder

# Functions of torch.distributed in which a rank waits for others.
COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv"),
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "gather", "scatter"),
        *("all_to_all", "all_to_all_single", "monitored_barrier", "batch_isend_irecv"),
        *("init_process_group", "new_group", "destroy_process_group", "_store_based_barrier"),
    }
)
# Local variables of those functions that hold the tensor whose shape every rank must agree on.
_TENSORS = ("tensor", "input_tensor", "output", "input", "output_tensor")
NUM_CALLS = 3  # of each rank, in the text about a hang
NUM_COMPARED = 16  # of each rank, to find the first that differs
_POINT_TO_POINT = frozenset({"send", "recv"})
got_oversized = False  # whether gloo has refused a message: this rank will end, and is held for now


def collectives_started() -> int:
    """Collectives that this process has started on torch's own backends."""
    status = recorder(False).get("pg_status", {}).values()
    return sum(max(0, int(group.get("last_enqueued_collective", 0))) for group in status)


def _last_calls(entries: list[dict[str, Any]], cells: Sequence[tuple[int, str]]) -> list[str]:
    """The last collectives that this rank has begun, oldest first, each with the cell it began in.

    Args:
        entries: the recorder's.
        cells: when each cell began, in ns, and its name; oldest first.
    """
    calls = []
    for entry in sorted(entries, key=lambda entry: entry.get("record_id", 0))[-NUM_CALLS:]:
        at = bisect_right(cells, int(entry.get("time_created_ns", 0)), key=itemgetter(0))
        cell = f"in {cells[at - 1][1]}" if at else ""
        calls.append(" ".join(filter(None, (*entry_text(entry), cell))))
    return calls


def _thread_state(thread: threading.Thread) -> tuple[str, int]:
    """(state letter, how often the thread went to sleep: constant while the thread is blocked)."""
    try:
        text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    except OSError:
        return "?", 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return fields["State"].strip()[:1], int(fields.get("voluntary_ctxt_switches", 0))


def _call_source(frame: FrameType) -> str:
    """Source text of the expression that the frame is evaluating, such as `work.wait()`."""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if not 0 <= at < len(positions):
        return ""
    first, last, start, end = positions[at]
    if first is None or first != last or start is None or end is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, first)
    return line.encode()[start:end].decode(errors="replace")


def _is_work(frame: FrameType, source: str) -> bool:
    """Whether `source` is `NAME.wait(…)` and NAME seems to be the handle of a collective."""
    callee = source.partition("(")[0]
    if not callee.endswith(".wait"):
        return False
    value = frame.f_locals.get(callee[:-5], frame.f_globals.get(callee[:-5]))
    if value is None:  # an expression such as `handles[i].wait()`
        return True
    return type(value).__module__.startswith(("torch", "minidist")) or "Work" in str(type(value))


def _tensor_text(frame: FrameType) -> tuple[str, str]:
    """(dtype, shape) of the tensor that a collective's frame works on, or empty strings."""
    values = frame.f_locals
    for name in _TENSORS:
        value: Any = values.get(name)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return str(value.dtype).removeprefix("torch."), str(list(value.shape))
    return "", ""


def _group_ranks(frame: FrameType) -> list[int]:
    """Global ranks of the group that a collective's frame works on; empty for all ranks."""
    group = frame.f_locals.get("group")
    if group is None:
        return []
    try:
        import torch.distributed as dist

        return [int(rank) for rank in dist.get_process_group_ranks(group)]
    except Exception:
        return []


def _is_torch(frame: FrameType) -> bool:
    return "/torch/" in frame.f_code.co_filename


def _stack(thread: threading.Thread) -> list[FrameType]:
    """The frames of `thread`, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def is_reporting(thread: threading.Thread) -> bool:
    """Whether the cell has ended with an exception whose traceback is being written."""
    shows = ("showtraceback", "show_interrupt")
    return any(frame.f_code.co_name in shows for frame in _stack(thread))


def call_of(frame: FrameType) -> str:
    """The collective whose function this frame is, such as "all_reduce (float32 [3])", or ""."""
    if not _is_collective(frame):
        return ""
    dtype, shape = _tensor_text(frame)
    return f"{frame.f_code.co_name} ({dtype} {shape})" if dtype else frame.f_code.co_name


def _is_collective(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.endswith("distributed_c10d.py") and code.co_name in COLLECTIVES


def _waits_in(frames: list[FrameType], pending: list[dict[str, Any]], asleep: bool) -> dict:
    """The collective that the thread waits in, or an empty dict. `frames`: innermost first."""
    for frame in frames:
        if _is_collective(frame):
            op = frame.f_code.co_name
            if op == "_store_based_barrier":
                op = "init_process_group"
            dtype, shape = _tensor_text(frame)
            peer = frame.f_locals.get("src" if op == "recv" else "dst")
            at = {"op": op, "dtype": dtype, "shape": shape, "ranks": _group_ranks(frame)}
            if op in _POINT_TO_POINT and isinstance(peer, int):
                at["peer"] = peer
            return at
    source = _call_source(frames[0])
    handles = (f.f_locals.get("self") for f in frames[:16] if f.f_code.co_name == "wait")
    handle = next((h for h in handles if "Work" in str(type(h))), None)
    in_wait = handle is not None or _is_work(frames[0], source)
    in_torch = asleep and bool(pending) and _is_torch(frames[0])
    if not in_wait and not in_torch:
        return {}
    if pending:
        op, dtype, shape = entry_text(pending[0])
        return {"op": op, "dtype": dtype, "shape": shape, "ranks": []}
    kind = next(
        (v for name in ("kind", "op", "name") if isinstance(v := getattr(handle, name, None), str)),
        "a collective (by its handle)",
    )
    outputs: Any = getattr(handle, "_outputs", None)
    tensor: Any = outputs[0] if isinstance(outputs, list) and outputs else None
    dtype, shape = ("", "")
    if hasattr(tensor, "dtype") and hasattr(tensor, "shape"):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))
    return {"op": kind, "dtype": dtype, "shape": shape, "ranks": []}


def _cell_line(frames: list[FrameType], compiler: Any) -> dict[str, Any]:
    """Cell, line and source of the innermost frame that belongs to a notebook cell."""
    for frame in frames:
        name = frame.f_code.co_filename
        try:
            cell = compiler.format_code_name(name)
        except Exception:
            return {}
        if cell:
            source = linecache.getline(name, frame.f_lineno).strip()
            return {"cell": " ".join(cell), "line": frame.f_lineno, "source": source[:200]}
    return {}


def _called(frames: list[FrameType], compiler: Any) -> str:
    """What the innermost frame of a cell has called: the called function, or the call's source."""
    inner = next((i for i, f in enumerate(frames) if _cell_line([f], compiler)), 0)
    if inner:
        return f"{frames[inner - 1].f_code.co_name}()"
    return _call_source(frames[0]) or frames[0].f_code.co_name


def where(thread: threading.Thread, kernel: Any) -> dict[str, Any]:
    """What `thread`, the main thread, is doing now.

    Returns a dict for JSON: state ("collective" or "running"), for a collective op, dtype, shape,
    ranks (of its group, empty for all) and peer; cell, line and source of the user's code; stack (a
    digest that changes when the thread moves), switches (how often it has slept), started
    (collectives of this cell so far), pending (collectives started and not done), calls (the last
    that were started, in this cell or an earlier one), numbered (more of them, to compare ranks:
    group, number in the group, operation, tensor) and oversized (see `got_oversized`).
    """
    entries = recorder(True).get("entries", [])
    pending = [entry for entry in entries if not entry.get("retired", True)]
    started = collectives_started()
    answer: dict[str, Any] = {
        "state": "running",
        "started": started - kernel.collectives_before,
        "pending": len(pending),
        "calls": _last_calls(entries, kernel.cells_begun),
        "numbered": [astuple(call) for call in last_calls(NUM_COMPARED)],
        "oversized": got_oversized,
    }
    frames = _stack(thread)
    if not frames:
        return answer
    letter, switches = _thread_state(thread)
    trail = [(f.f_code.co_filename, f.f_code.co_name, f.f_lasti) for f in frames]
    answer.update(stack=hash((tuple(trail), started)), switches=switches)
    answer.update(_cell_line(frames, kernel.shell.compile))
    waits = _waits_in(frames, pending, letter == "S")
    if waits:
        answer.update(waits, state="collective")
    elif any(f.f_code.co_name == "_input_request" for f in frames[:8]):
        answer["doing"] = "waits for input()"
    elif waits := program(frames, _call_source(frames[0])):
        answer.update(waits)
    elif letter == "S" and not kernel.executing:
        answer["doing"] = "has not begun the cell"
    elif letter == "S":
        answer["doing"] = f"sleeps or waits in {_called(frames, kernel.shell.compile)}"[:120]
    return answer


def _memory() -> int:
    """Bytes of main memory that this process occupies; 0 if that is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


def _device() -> dict[str, Any]:
    """The device in use and the bytes allocated there. Never initialises CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"device": "cpu"}
    if not torch.cuda.is_initialized():
        return {"device": "cpu (no GPU used yet)"}
    used = {i: torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())}
    busy = [i for i, size in used.items() if size] or [torch.cuda.current_device()]
    names = ", ".join(f"cuda:{i}" for i in busy)
    return {"device": names, "device_memory": sum(used.values())}


def status() -> dict[str, Any]:
    """What `%ranks` shows of this rank: process group, device, memory in bytes, last collective."""
    answer: dict[str, Any] = {"memory": _memory(), **_device()}
    distributed = sys.modules.get("torch.distributed")
    joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if joined and distributed is not None:
        size = distributed.get_world_size()
        answer["group"] = f"{distributed.get_backend()}, {size} rank{'' if size == 1 else 's'}"
    entries = recorder(True).get("entries", [])
    if entries:
        last = max(entries, key=lambda entry: entry.get("record_id", 0))
        op, dtype, shape = entry_text(last)
        tensor = f" ({dtype} {shape})" if dtype else ""
        open_still = joined and not last.get("retired", True)
        answer["collective"] = f"{op}{tensor}{', not done' if open_still else ''}"
    return answer
