"""Replay of a trace on a cluster: exact virtual time, the same on every run and every machine.

[Note: how virtual time is replayed]

Every rank has streams, each with a clock; compute moves the clock of its stream, and most programs
use stream 0 only. A collective is handed to the communication stream of its group,
which works in order; the collective starts when all of its ranks have reached the point where they
issue it and their streams and links are free, and takes the time that
`minidist.cost.comm.collective_seconds` gives for the slowest link that its group needs. `wait`
moves the clock of the stream that waits to the end of the collective. A message is eager: it leaves
when it is sent, on a stream per direction. The host costs nothing: it is always far enough ahead to
keep the streams busy.

    t(ring all-reduce of B bytes on n ranks) = 2(n-1)/n * B / bandwidth + 2(n-1) * latency

(Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.)
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minidist.cost.comm import collective_seconds
from minidist.emulate.clusters import Cluster
from minidist.emulate.trace import Event, Trace
from minidist.errors import ProtocolError


@dataclass(frozen=True)
class Interval:
    """What one rank did for a while.

    `compute` and `idle` are what stream 0 does, `copy` is compute on a different stream, and
    `communication` overlaps with them.
    """

    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Step:
    """One training step: from the first charge of its forward pass to the start of the next."""

    start_s: float
    end_s: float
    efficiency: float


@dataclass
class Timeline:
    """What happened when, in virtual seconds."""

    cluster: str
    world_size: int
    makespan_s: float
    intervals: list[list[Interval]]  # per rank, by start
    event_times: list[list[tuple[float, float]]]
    """Per rank and event: of a compute its span; of an issue the span of its collective (of a
    recv: of the message); of a wait its stream's clock before and after."""
    bytes_per_link: dict[str, float] = field(default_factory=dict)
    """Bytes that left each device's port ("device 0") and each node's ("node 0")."""
    steps: list[Step] = field(default_factory=list)
    """Per charged step (see `Event.step`); empty when nothing was charged by layer."""

    @property
    def efficiency(self) -> float:
        """Share of the ranks' time that is compute, from the first compute to the end; 0 to 1.

        What comes before any compute (wrapping a model, say) does not count.
        """
        start_s = min(
            (i.start_s for rank in self.intervals for i in rank if i.kind == "compute"),
            default=self.makespan_s,
        )
        return self.efficiency_between(start_s, self.makespan_s)

    def efficiency_between(self, start_s: float, end_s: float) -> float:
        """Share of compute in the ranks' time within a span; 0 for an empty one."""
        if end_s <= start_s:
            return 0.0
        busy_s = math.fsum(
            max(0.0, min(i.end_s, end_s) - max(i.start_s, start_s))
            for rank in self.intervals
            for i in rank
            if i.kind == "compute"
        )
        return busy_s / (self.world_size * (end_s - start_s))

    def to_json(self) -> str:
        """Everything as JSON, equal byte for byte for equal timelines."""
        return json.dumps(
            {
                "cluster": self.cluster,
                "world_size": self.world_size,
                "makespan_s": self.makespan_s,
                "efficiency": self.efficiency,
                "intervals": [
                    [[i.kind, i.name, i.start_s, i.end_s] for i in rank] for rank in self.intervals
                ],
                "event_times": self.event_times,
                "bytes_per_link": self.bytes_per_link,
                "steps": [[s.start_s, s.end_s, s.efficiency] for s in self.steps],
            },
            sort_keys=True,
            separators=(",", ":"),
        )


@dataclass
class _Pending:
    """A collective of which at least one rank has issued its part."""

    first: Event
    needed: int
    issued: list[tuple[int, int, float]] = field(default_factory=list)  # rank, event, time
    span: tuple[float, float] | None = None


class _Replay:
    def __init__(self, trace: Trace, cluster: Cluster) -> None:
        self.cluster = cluster
        self.events = trace.events
        self.size = trace.world_size
        self.clock: list[dict[int, float]] = [{0: 0.0} for _ in range(self.size)]
        self.queues = [_by_stream(events) for events in trace.events]
        self.marks: dict[tuple[int, str], float] = {}
        self.pending: dict[str, _Pending] = {}
        self.ready: dict[str, float] = {}  # complete, not yet started -> latest issue
        self.streams: dict[tuple[str, object], float] = {}
        self.ports: dict[tuple[str, int], float] = {}
        self.heads = _issue_order(trace.events, self._streams_of)
        self.intervals: list[list[Interval]] = [[] for _ in range(self.size)]
        self.times: list[list[tuple[float, float]]] = [
            [(0.0, 0.0)] * len(events) for events in self.events
        ]
        self.link_bytes: dict[str, float] = {}

    def run(self) -> None:
        while True:
            # Let every rank go on until it waits for a collective that has no end yet ...
            moved = [self._advance(rank) for rank in range(self.size)]
            # ... then start the collective that can start first. Ranks issue later collectives
            # after its start, so links are occupied in the order of virtual time.
            started = self._start_earliest()
            if not started and not any(moved):
                break
        stuck = [
            f"rank {rank} waits for {self._waits_for(self.events[rank][queue[0]])}"
            for rank, queues in enumerate(self.queues)
            for queue in queues.values()
            if queue and self.events[rank][queue[0]].kind == "wait"
        ]
        if stuck:
            what = "; ".join(stuck)
            raise ProtocolError(f"the trace cannot be replayed to its end: {what}")

    def _waits_for(self, event: Event) -> str:
        pending = self.pending.get(event.key)
        if pending is None:
            return f"{event.key}, which nobody has issued"
        there = sorted({issuer for issuer, _, _ in pending.issued})
        return f"{pending.first.name or pending.first.collective} {event.key}, issued by {there}"

    # ------------------------------------------------------------------- ranks

    def _advance(self, rank: int) -> bool:
        """Let every stream of a rank go on as far as it can."""
        moved, again = False, True
        while again:  # a stream may have waited for a mark of another stream
            again = False
            for stream, queue in self.queues[rank].items():
                while queue and self._step(rank, stream, queue[0]):
                    queue.popleft()
                    again = moved = True
        return moved

    def _step(self, rank: int, stream: int, index: int) -> bool:
        """One event of one stream; False if it has to wait."""
        event, now_s = self.events[rank][index], self.clock[rank].setdefault(stream, 0.0)
        end_s = now_s
        if event.kind == "compute":
            seconds = event.duration_s
            if seconds is None:
                seconds = self.cluster.roofline_seconds(event.flops, event.num_bytes)
            end_s = now_s + seconds
            # Compute on other streams counts as a copy: efficiency is about stream 0 only.
            self._add(rank, "copy" if stream else "compute", event.name, now_s, end_s)
        elif event.kind == "issue":
            self._issue(rank, index, event, now_s)
            return True
        elif event.kind == "record":
            self.marks[rank, event.key] = now_s
        else:
            if event.kind == "after":
                until_s = self.marks.get((rank, event.key))
            else:
                pending = self.pending.get(event.key)
                until_s = pending.span[1] if pending is not None and pending.span else None
            if until_s is None:
                return False
            end_s = max(now_s, until_s)
            if stream == 0:
                self._add(rank, "idle", event.name, now_s, end_s)
        self.clock[rank][stream] = end_s
        self.times[rank][index] = (now_s, end_s)
        return True

    def _add(self, rank: int, kind: str, name: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.intervals[rank].append(Interval(kind, name, start_s, end_s))

    def _issue(self, rank: int, index: int, event: Event, now_s: float) -> None:
        message = event.collective in ("send", "recv")
        pending = self.pending.get(event.key)
        if pending is None:
            pending = _Pending(event, 1 if message else len(event.ranks))
            self.pending[event.key] = pending
        if event.collective == "recv":
            # The sender decides when the message travels; the span is filled in later.
            pending.issued.append((rank, index, now_s))
            if pending.span is not None:
                self.times[rank][index] = pending.span
            return
        # For an uneven all_to_all the largest part counts, whichever rank is first.
        if event.collective == "send" or event.nbytes > pending.first.nbytes:
            pending.first = event
        pending.issued.append((rank, index, now_s))
        there = [t for r, i, t in pending.issued if self.events[r][i].collective != "recv"]
        if len(there) == pending.needed:
            self.ready[event.key] = max(there)

    # ------------------------------------------------------------- collectives

    @staticmethod
    def _streams_of(event: Event) -> list[tuple[str, object]]:
        """Streams that work in order: one per group and rank, one per direction of messages."""
        if event.collective == "send":
            return [(event.group, event.ranks)]
        return [(event.group, rank) for rank in event.ranks]

    def _start_earliest(self) -> bool:
        best: tuple[float, str] | None = None
        for key, issued_s in self.ready.items():
            streams = self._streams_of(self.pending[key].first)
            if any(self.heads[stream][0] != key for stream in streams):
                continue  # an earlier collective of the same stream has not started
            start_s = max(issued_s, *(self.streams.get(stream, 0.0) for stream in streams))
            if best is None or (start_s, key) < best:
                best = (start_s, key)
        if best is None:
            return False
        start_s, key = best
        pending, event = self.pending[key], self.pending[key].first
        ports, flows = self._route(event)
        start_s = max(start_s, *(self.ports.get(port, 0.0) for port in ports), 0.0)
        link = self.cluster.link_between(event.ranks)
        end_s = start_s + collective_seconds(
            kind=event.collective, num_bytes=event.nbytes, num_ranks=len(event.ranks), link=link
        )
        del self.ready[key]
        for stream in self._streams_of(event):
            self.heads[stream].popleft()
            self.streams[stream] = end_s
        for port in ports:
            self.ports[port] = end_s
        for name, sent in flows.items():
            self.link_bytes[name] = self.link_bytes.get(name, 0.0) + sent
        pending.span = (start_s, end_s)
        for rank, index, _ in pending.issued:
            self.times[rank][index] = pending.span
        for rank in sorted(set(event.ranks)):
            self._add(rank, "communication", f"{event.collective} {key}", start_s, end_s)
        return True

    def _route(self, event: Event) -> tuple[list[tuple[str, int]], dict[str, float]]:
        """Ports that a collective occupies, and the bytes that leave each of them."""
        ports: set[tuple[str, int]] = set()
        flows: dict[str, float] = {}
        for source, target, sent in _flows(event):
            a, b = self.cluster.node_of(source), self.cluster.node_of(target)
            ports |= {("device out", source), ("device in", target)}
            flows[f"device {source}"] = flows.get(f"device {source}", 0.0) + sent
            if a != b:
                ports |= {("node out", a), ("node in", b)}
                flows[f"node {a}"] = flows.get(f"node {a}", 0.0) + sent
        return sorted(ports), flows


def _by_stream(events: list[Event]) -> dict[int, deque[int]]:
    """Per stream of one rank the indices of its events."""
    queues: dict[int, deque[int]] = {}
    for index, event in enumerate(events):
        queues.setdefault(event.stream, deque()).append(index)
    return queues


def _issue_order(
    events: list[list[Event]], streams_of: Callable[[Event], list[tuple[str, object]]]
) -> dict[tuple[str, object], deque[str]]:
    """Per communication stream the keys in the order in which the program issued them.

    Recvs are left out, because the sender decides when a message travels.
    """
    order: dict[tuple[str, object], deque[str]] = {}
    for rank, own in enumerate(events):
        for event in own:
            if event.kind != "issue" or event.collective == "recv":
                continue
            for stream in streams_of(event):
                if event.collective == "send" or stream[1] == rank:
                    order.setdefault(stream, deque()).append(event.key)
    return order


def _flows(event: Event) -> Iterable[tuple[int, int, float]]:
    """Which rank sends how many bytes to which rank: (source, target, bytes)."""
    ranks, nbytes, n = event.ranks, float(event.nbytes), len(event.ranks)
    if event.collective == "send":
        return [(ranks[0], ranks[1], nbytes)]
    if n == 1:
        return []
    ring = [(ranks[i], ranks[(i + 1) % n]) for i in range(n)]
    if event.collective in ("all_reduce", "all_gather", "reduce_scatter", "barrier"):
        share = (2 if event.collective == "all_reduce" else 1) * (n - 1) / n
        return [(a, b, share * nbytes) for a, b in ring]
    if event.collective == "all_to_all":
        return [(a, b, nbytes / n) for a in ranks for b in ranks if a != b]
    root = ranks[0] if event.root is None else event.root
    if event.collective == "broadcast":
        return [(a, b, nbytes) for a, b in ring if b != root]
    if event.collective == "reduce":
        return [(a, b, nbytes) for a, b in ring if a != root]
    others = [rank for rank in ranks if rank != root]
    if event.collective == "gather":
        return [(rank, root, nbytes / n) for rank in others]
    return [(root, rank, nbytes / n) for rank in others]


def simulate(trace: Trace, cluster: Cluster) -> Timeline:
    """Replay a trace on a cluster.

    Raises:
        ValueError: the trace has more ranks than the cluster has devices.
        ProtocolError: a rank waits for a collective that the others never issued.
    """
    if trace.world_size > cluster.num_devices:
        raise ValueError(
            f"simulate: {trace.world_size} ranks do not fit on {cluster.num_devices} devices "
            f"of {cluster.name!r}"
        )
    replay = _Replay(trace, cluster)
    replay.run()
    spans = [p.span[1] for p in replay.pending.values() if p.span is not None]
    makespan_s = max([0.0, *spans, *(end_s for rank in replay.clock for end_s in rank.values())])
    for rank, intervals in enumerate(replay.intervals):
        if makespan_s > replay.clock[rank][0]:
            intervals.append(Interval("idle", "end", replay.clock[rank][0], makespan_s))
        intervals.sort(key=lambda i: (i.start_s, i.end_s, i.kind, i.name))
    timeline = Timeline(
        cluster=cluster.name,
        world_size=trace.world_size,
        makespan_s=makespan_s,
        intervals=replay.intervals,
        event_times=replay.times,
        bytes_per_link=replay.link_bytes,
    )
    timeline.steps = _steps(trace, timeline)
    return timeline


def _steps(trace: Trace, timeline: Timeline) -> list[Step]:
    """Cut the timeline where the first rank is charged for the forward pass of a new step."""
    starts: dict[int, float] = {}
    for rank, events in enumerate(trace.events):
        for index, event in enumerate(events):
            if event.kind == "compute" and event.step is not None:
                start_s = timeline.event_times[rank][index][0]
                starts[event.step] = min(start_s, starts.get(event.step, math.inf))
    ordered = [starts[n] for n in sorted(starts)]
    ends = [*ordered[1:], timeline.makespan_s][: len(ordered)]
    return [
        Step(start, end, timeline.efficiency_between(start, end))
        for start, end in zip(ordered, ends, strict=True)
    ]
