"""What the ranks of a session did, as the broker saw it: the input of `simulate`.

See [Note: how virtual time is replayed].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["compute", "issue", "wait", "record", "after"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that one rank did.

    `compute` has `duration_s`, or `flops` and `num_bytes` for the device's roofline.
    `issue` hands a collective to the communication stream of its group.
    `wait` makes the stream wait for the end of the collective `key`.
    `record` marks a point of its stream; `after` makes its stream wait for that mark, `key`.
    """

    kind: EventKind
    name: str = ""
    stream: int = 0  # of the rank's device; stream 0 does the compute
    # compute
    duration_s: float | None = None
    flops: float = 0.0
    num_bytes: float = 0.0  # moved between the device and its memory
    layer: int | None = None
    direction: str | None = None  # forward | backward
    step: int | None = None  # how many requests for this layer and direction came before
    # issue and wait
    key: str = ""
    collective: str = ""  # all_reduce, broadcast, ..., send, recv
    op: str = ""  # sum, avg, ... where the collective reduces
    group: str = ""
    ranks: tuple[int, ...] = ()  # global ranks of the group; of a send or recv: (source, target)
    nbytes: int = 0  # see `minidist.cost.comm.collective_seconds`
    numel: int = 0
    dtype: str = ""
    root: int | None = None  # global rank


@dataclass(kw_only=True)
class Collective:
    """One collective (or one send with its recv) of a session.

    Payloads and result are numpy arrays (bfloat16 as float32) and present only when the broker
    keeps payloads. `payloads[rank]` is what that rank sent, flattened; `result` is what an
    all_reduce, reduce, broadcast or all_gather gave, and None for the other kinds.
    """

    key: str
    kind: str
    op: str
    group: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    dtype: str
    root: int | None = None
    arrived: tuple[int, ...] = ()  # ranks that issued it
    completed: bool = False
    payloads: dict[int, Any] = field(default_factory=dict)
    result: Any = None


@dataclass(kw_only=True)
class Trace:
    """A session: per rank what it did in its order, the collectives, and what went wrong."""

    world_size: int
    events: list[list[Event]]
    collectives: list[Collective] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
