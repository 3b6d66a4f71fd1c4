"""The last collectives that this process has begun, also told when gloo ends the process.

Source: torch's flight recorder, which keeps them by default, on gloo and NCCL alike, whoever calls:
Python code, DDP's reducer or autograd. Importing this module does not import torch.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DTYPES = {"float": "float32", "double": "float64", "long": "int64", "half": "float16"}
# In these collectives, by the recorder's names, every rank of a group passes the same shape.
_SAME_SHAPES = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier"}
)
# The C++ library that torch has loaded, and std::set_terminate as its compiler writes the name.
_CPP = "libc++.1.dylib" if sys.platform == "darwin" else "libstdc++.so.6"
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"
_EXCEPTION_TYPE = "__cxa_current_exception_type"

OVERSIZED = (
    "a message came that is larger than the tensor which receives it: for a send and its receive, "
    "the number of elements and the dtype must be the same"
)

_handlers: list[Any] = []  # C++ keeps only an address, so these must not be freed


def recorder(collectives: bool) -> dict[str, Any]:
    """torch's flight recorder, without stack traces (those take seconds).

    Args:
        collectives: whether each collective is listed, or only the state of each group.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return {}
    core = sys.modules["torch._C._distributed_c10d"]
    try:
        return json.loads(core._dump_fr_trace_json(includeCollectives=collectives))  # type: ignore[attr-defined]
    except Exception:  # some torch builds have no recorder: then only frames are used
        return {}


def entry_text(entry: dict[str, Any]) -> tuple[str, str, str]:
    """(operation, dtype, shape) of one of the recorder's entries; the last two may be empty."""
    sizes = entry.get("input_sizes") or [[]]
    dtypes = [str(d).lower() for d in entry.get("input_dtypes") or []]
    dtype = _DTYPES.get(dtypes[0], dtypes[0]) if dtypes else ""
    op = str(entry.get("profiling_name", "")).partition(":")[2] or "a collective"
    return op, dtype, str(sizes[0]) if dtypes else ""


@dataclass(frozen=True)
class NumberedCall:
    """One collective as one rank called it: the group's name, and its number in the group."""

    group: str
    number: int
    op: str
    tensor: str  # "float32 [3, 4]"; empty for a barrier

    def __str__(self) -> str:
        return f"{self.op} {self.tensor}".strip()


def last_calls(num: int = 64) -> list[NumberedCall]:
    """The last collectives of this process, oldest first; without send and recv."""
    entries = [e for e in recorder(True).get("entries", []) if not e.get("is_p2p")]
    calls = []
    for entry in sorted(entries, key=lambda entry: entry.get("record_id", 0))[-num:]:
        op, dtype, shape = entry_text(entry)
        group = "/".join(map(str, entry.get("process_group", [])))
        number = int(entry.get("collective_seq_id", 0))
        calls.append(NumberedCall(group, number, op, f"{dtype} {shape}".strip()))
    return calls


def disagreement(calls: Mapping[int, Sequence[NumberedCall]]) -> str:
    """The first collective that ranks called differently, in words; empty if there is none.

    Args:
        calls: rank -> what the rank has called, oldest first.

    >>> a = NumberedCall("world", 4, "all_reduce", "float32 [3]")
    >>> b = NumberedCall("world", 4, "barrier", "")
    >>> disagreement({0: [a], 1: [b], 2: [a]})
    'the ranks called different collectives: ranks 0, 2: all_reduce float32 [3]; rank 1: barrier'
    """
    met: dict[tuple[str, int], dict[int, NumberedCall]] = {}
    for rank in sorted(calls):
        for call in calls[rank]:
            met.setdefault((call.group, call.number), {})[rank] = call
    for _, said in sorted(met.items(), key=lambda item: item[0][1]):
        if differ((call.op, call.tensor) for call in said.values()):
            return in_words({rank: str(call) for rank, call in said.items()})
    return ""


def differ(calls: Iterable[tuple[str, object]]) -> bool:
    """Whether the ranks' calls of one collective do not match.

    Args:
        calls: of each rank, the operation ("all_reduce", or "gloo:all_reduce") and what is known of
            the tensors.
    """
    ops, tensors = map(set, zip(*calls, strict=True))
    same = {op.split(":")[-1] for op in ops} <= _SAME_SHAPES
    return len(ops) > 1 or (same and len(tensors) > 1)


def in_words(said: Mapping[int, str]) -> str:
    """A line that names the ranks by what they called."""
    by_call: dict[str, list[int]] = {}
    for rank, text in sorted(said.items()):
        by_call.setdefault(text, []).append(rank)
    parts = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_call.items()
    ]
    return f"the ranks called different collectives: {'; '.join(parts)}"


def at_terminate(do: Callable[[str], object]) -> None:
    """Call `do` before C++ ends this process because nobody catches an exception.

    Gloo's own thread does so if the size of a message is not the one that the rank expects. `do`
    runs in the thread that ends the process, while the main thread may be blocked in a collective.
    It gets the exception's C++ type as the compiler writes the name, such as
    "N4gloo13EnforceNotMetE". If the C++ library has no `set_terminate`, `do` is never called.
    """
    try:
        library = ctypes.CDLL(_CPP)
        set_terminate, type_of = library[_SET_TERMINATE], library[_EXCEPTION_TYPE]
    except (OSError, AttributeError):
        return
    handler_type = ctypes.CFUNCTYPE(None)
    type_of.restype = ctypes.c_void_p
    set_terminate.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]
    before: list[Callable[[], None]] = []

    def handler() -> None:
        try:
            do(_name_of(type_of()))
        finally:
            before[0]()  # the original: prints what the exception says, and aborts

    kept = handler_type(handler)
    address = set_terminate(ctypes.cast(kept, ctypes.c_void_p))
    before.append(ctypes.cast(address, handler_type))
    _handlers.append(kept)


def is_oversized(exception: str) -> bool:
    """Whether `at_terminate` tells of a message that is larger than the tensor that receives it."""
    return "gloo" in exception and "EnforceNotMet" in exception


def _name_of(type_info: int | None) -> str:
    """The name in a C++ type_info: the second word of the object."""
    if not type_info:
        return ""
    at = ctypes.cast(type_info + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))
    return (at.contents.value or b"").decode(errors="replace")
