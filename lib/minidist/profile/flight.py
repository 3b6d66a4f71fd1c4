"""Find the rank that is missing from a collective, and the line, with torch's flight recorder.

By default torch keeps a list of the last collectives of every process, on gloo and NCCL
(TORCH_FR_BUFFER_SIZE). In each group, collective number k of one rank belongs to number k of the
other ranks. So the lists explain a hang: the ranks that have queued number k and have not finished
it are waiting for the ranks that have not queued number k.

Phases: take a dump on every rank, from a thread that is not stuck; collect the dumps as files;
compare the dumps.

Example, on every rank::

    with dump_on_hang("/shared/dumps", after_s=120):    # a file per rank if it takes longer
        train_step()

and afterwards, anywhere::

    print(explain_hang(read_dumps("/shared/dumps")))

which says, for instance::

    group 0, collective 7:
      rank 0 waits in gloo:all_reduce [[2]] at train.py:31 in step
      rank 1 never called it; its last is 6, gloo:broadcast [[8]] at train.py:20 in load

Messages (send, recv) have no number in a group and are not compared. torch-native: the program
`torchfrtrace` (module torch.distributed.flight_recorder) reads the files that NCCL's watchdog
writes at a timeout (TORCH_NCCL_DUMP_ON_TIMEOUT).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.processes.last_calls import differ


def take_dump() -> dict[str, Any]:
    """The content of this process's flight recorder, with Python frames, storable as JSON.

    May be called from any thread. Finding the lines of the frames can take some seconds.

    Returns:
        torch's dump ("entries", "pg_status", …), "rank", and "groups": name -> global ranks.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as core

    # The data comes from this process itself, so unpickling is safe.
    dump = pickle.loads(core._dump_fr_trace())  # type: ignore[attr-defined]
    world = dist.distributed_c10d._world
    dump["rank"] = dist.get_rank()
    dump["groups"] = {
        str(name): sorted(world.pg_group_ranks.get(pg, {})) for pg, name in world.pg_names.items()
    }
    return dump


def write_dump(folder: str | Path) -> Path:
    """Write this rank's dump to `folder`/rankN.json; the file is complete or does not exist."""
    dump = take_dump()
    path = Path(folder) / f"rank{dump['rank']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(dump, default=str), encoding="utf-8")
    partial.replace(path)
    return path


def read_dumps(folder: str | Path) -> dict[int, dict[str, Any]]:
    """All dumps in a folder, by rank. A rank that could not write a dump is not in the result."""
    dumps = [json.loads(path.read_text("utf-8")) for path in Path(folder).glob("rank*.json")]
    return {int(dump["rank"]): dump for dump in dumps}


@contextlib.contextmanager
def dump_on_hang(folder: str | Path, *, after_s: float) -> Iterator[None]:
    """Write this rank's dump if the block runs longer than `after_s` seconds. The block continues.

    Collectives release Python's lock while they wait, so the timer's thread can run.
    """
    timer = threading.Timer(after_s, write_dump, [folder])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be writing


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One rank's call of a collective.

    Attributes:
        number: number of the collective in its group, from 1.
        where: "file:line in function" of the innermost frame outside torch; "" if unknown.
    """

    rank: int
    number: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        shapes = "[" + ", ".join(str(list(shape)) for shape in self.shapes) + "]"
        return f"{self.name} {shapes}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A collective that did not end.

    Attributes:
        waiting: the calls of the ranks that have called the collective and wait in it.
        missing: rank that has not called it -> its last call in this group, if known.
        unknown: ranks of the group without a dump: the process has ended, or is too stuck to write.
    """

    group: str
    number: int
    waiting: tuple[RecordedCall, ...]
    missing: Mapping[int, RecordedCall | None]
    unknown: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [f"group {self.group}, collective {self.number}:"]
        lines += [f"  rank {call.rank} waits in {call}" for call in self.waiting]
        for rank, last in self.missing.items():
            what = f"its last is {last.number}, {last}" if last else "nor any other of this group"
            lines.append(f"  rank {rank} never called it; {what}")
        lines += [f"  rank {rank} left no dump" for rank in self.unknown]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A collective number in a group at which the ranks' calls differ in name, shapes or dtypes."""

    group: str
    number: int
    calls: tuple[RecordedCall, ...]

    def __str__(self) -> str:
        lines = [f"group {self.group}, collective {self.number} differs between ranks:"]
        return "\n".join([*lines, *(f"  rank {call.rank}: {call}" for call in self.calls)])


def find_stuck(dumps: Mapping[int, Mapping[str, Any]]) -> list[Stuck]:
    """The first collective of each group that some rank has called and not finished.

    Use the dumps of a job that hangs. In a job that runs normally, the result is just the
    collectives in progress.
    """
    states = {rank: _State(rank, dump) for rank, dump in dumps.items()}
    members: dict[str, set[int]] = {}
    for rank, state in states.items():
        for name in (*state.groups, *state.calls):
            members.setdefault(name, set()).update(state.groups.get(name, ()), [rank])
    found = []
    for name in sorted(members):
        there = [states[rank] for rank in sorted(members[name]) if rank in states]
        number = min((s.completed(name) for s in there), default=0) + 1
        waiting = [s for s in there if s.enqueued(name) >= number > s.completed(name)]
        if not waiting:
            continue
        found.append(
            Stuck(
                group=name,
                number=number,
                waiting=tuple(c for s in waiting if (c := s.call(name, number)) is not None),
                missing={s.rank: s.last(name) for s in there if s.enqueued(name) < number},
                unknown=tuple(sorted(members[name] - set(states))),
            )
        )
    return found


def find_mismatches(dumps: Mapping[int, Mapping[str, Any]]) -> list[Mismatch]:
    """The first collective number of each group at which the ranks' calls do not match.

    Later numbers are not reported: after the first mismatch the ranks' numbers are shifted.
    """
    by_number: dict[tuple[str, int], list[RecordedCall]] = {}
    for rank, dump in sorted(dumps.items()):
        for name, calls in _State(rank, dump).calls.items():
            for number, call in calls.items():
                by_number.setdefault((name, number), []).append(call)
    first: dict[str, Mismatch] = {}
    for (name, number), calls in sorted(by_number.items()):
        if differ((call.name, (call.shapes, call.dtypes)) for call in calls):
            first.setdefault(name, Mismatch(group=name, number=number, calls=tuple(calls)))
    return list(first.values())


def explain_hang(dumps: Mapping[int, Mapping[str, Any]]) -> str:
    """The mismatches and the stuck collectives in the dumps, as readable lines."""
    found = [*find_mismatches(dumps), *find_stuck(dumps)]
    if not found:
        return f"{len(dumps)} ranks: every collective that was called has ended"
    return "\n".join(map(str, found))


class _State:
    """The content of one rank's dump, by group name."""

    def __init__(self, rank: int, dump: Mapping[str, Any]) -> None:
        self.rank = rank
        self.groups = {name: tuple(ranks) for name, ranks in dump.get("groups", {}).items()}
        self.calls: dict[str, dict[int, RecordedCall]] = {}
        # pg_id is a number inside one process, so ranks may have different numbers for a group.
        # Use the group's name instead.
        names: dict[str, str] = {}
        for entry in dump.get("entries", ()):
            name = str(entry["process_group"][0])
            names[str(entry["pg_id"])] = name
            if not entry.get("is_p2p"):
                number = int(entry["collective_seq_id"])
                self.calls.setdefault(name, {})[number] = _call(rank, number, entry)
        self._status = {
            names[pg_id]: status
            for pg_id, status in dump.get("pg_status", {}).items()
            if pg_id in names
        }

    def enqueued(self, group: str) -> int:
        return max(0, int(self._status.get(group, {}).get("last_enqueued_collective", 0)))

    def completed(self, group: str) -> int:
        return max(0, int(self._status.get(group, {}).get("last_completed_collective", 0)))

    def call(self, group: str, number: int) -> RecordedCall | None:
        return self.calls.get(group, {}).get(number)

    def last(self, group: str) -> RecordedCall | None:
        return self.call(group, self.enqueued(group))


def _call(rank: int, number: int, entry: Mapping[str, Any]) -> RecordedCall:
    return RecordedCall(
        rank=rank,
        number=number,
        name=str(entry["profiling_name"]),
        shapes=tuple(tuple(shape) for shape in entry.get("input_sizes", ())),
        dtypes=tuple(entry.get("input_dtypes", ())),
        where=_where(entry.get("frames", ())),
    )


def _where(frames: Any) -> str:
    """The innermost frame outside torch, or the innermost frame if all are inside torch."""
    frames = list(frames)
    own = [f for f in frames if "/torch/" not in str(f["filename"]).replace("\\", "/")]
    for frame in own or frames:
        return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return ""
