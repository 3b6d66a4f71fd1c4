"""The torch.distributed backend "emulated": collectives that travel through the broker.

A collective's data is sent when it is called and fetched when somebody waits for it: the order of
messages on the rank's one connection is the order of events in virtual time. Importing this
registers the backend; `emulated_world` makes it the default process group for a block.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from minidist.emulate import arrays, wire
from minidist.emulate.client import Client, CollectiveError, CollectiveMismatch
from minidist.launch import isolated_world

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "EmulatedGroup",
    "EmulatedWork",
    "current_client",
    "emulated_world",
]

Tensors = Sequence[torch.Tensor]
_OPS = (
    ("sum", dist.ReduceOp.SUM),
    ("avg", dist.ReduceOp.AVG),
    ("max", dist.ReduceOp.MAX),
    ("min", dist.ReduceOp.MIN),
    ("product", dist.ReduceOp.PRODUCT),
    ("band", dist.ReduceOp.BAND),
    ("bor", dist.ReduceOp.BOR),
    ("bxor", dist.ReduceOp.BXOR),
)
# Names of groups count from here, per session: equal on all ranks, unlike any other group's.
_BASE = 1_000_000
_client: Client | None = None


@contextlib.contextmanager
def emulated_world(sock: socket.socket, rank: int, world_size: int) -> Iterator[Client]:
    """One session on this rank: inside, `torch.distributed` is the emulated cluster.

    The broker's `begin` comes before, its `end` after all ranks have left their blocks. The same
    socket serves one block after another. What was the default group before is so again after.

    Yields:
        The connection; its `charge(layer, direction)` is the channel that `Charged` wants.

    Raises:
        CollectiveError: no session has begun, or the connection is broken; from a collective's
            wait: a rank is missing. CollectiveMismatch: ranks called different collectives.
    """
    global _client
    client = Client(sock, rank, world_size)
    client.join()
    before, _client = _client, client
    try:
        with isolated_world(
            "emulated",
            store=dist.HashStore(),
            rank=rank,
            world_size=world_size,
            base=_BASE + 10_000 * client.session,
        ):
            yield client
    finally:
        _client = before
        client.leave()


def current_client() -> Client:
    """The connection of the block that runs now; RuntimeError outside of one."""
    if _client is None:
        raise RuntimeError('the backend "emulated" works only inside `with emulated_world(...)`')
    return _client


class EmulatedWork(dist._Work):
    """A collective under way. `wait` fetches the result and moves the rank's compute clock."""

    def __init__(
        self,
        client: Client,
        key: str,
        outputs: Tensors,
        store: Callable[[np.ndarray], None] | None,
        *,
        eager: bool = False,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._client = client
        self._key = key
        self._outputs = list(outputs)
        self._store = store
        self._fetched = eager  # an eager send needs no answer
        self._waited = False
        self._source = source
        self._lock = threading.RLock()

    def wait(self, timeout: Any = None) -> bool:
        with self._lock:
            if not self._fetched:
                self._fetch(moves_clock=True)
            elif not self._waited:
                self._report_wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """A completed future; what waits for it in C++ (DDP's reducer) does so at backward's end.

        The result is fetched here and now: a reader thread that completed futures would run
        their callbacks, which may call collectives themselves.
        """
        with self._lock:
            if not self._fetched:
                self._fetch(moves_clock=False)
                self._report_wait_later()
        future = _Future(self)
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        with self._lock:
            if not self._fetched:
                answer, _ = self._client.call({"t": "poll", "key": self._key})
                if not answer.get("done"):
                    return False
                self._fetch(moves_clock=False)
                self._report_wait_later()
        return True

    def is_success(self) -> bool:
        return self._fetched

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        return self._source

    def _fetch(self, *, moves_clock: bool) -> None:
        _, payload = self._client.call({"t": "fetch", "key": self._key, "wait": moves_clock})
        self._fetched = True
        self._waited = moves_clock
        if self._store is not None:
            # Copies of ours are no compute of the rank: a roofline must not see them.
            with torch.no_grad(), _disable_current_modes():
                self._store(payload)
            self._store = None

    def _report_wait(self) -> None:
        with self._lock:
            if not self._waited:
                self._waited = True
                self._client.post({"t": "wait", "key": self._key})

    def _report_wait_later(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._report_wait)
        else:
            self._report_wait()


class _Future(torch.futures.Future):
    """Tells when Python code waits for it; C++ code uses the future below and does not."""

    def __init__(self, work: EmulatedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work._report_wait()
        return super().wait()


class _ManyWorks(dist._Work):
    """Several collectives that were called as one."""

    def __init__(self, works: list[EmulatedWork], outputs: Tensors) -> None:
        super().__init__()
        self._works = works
        self._outputs = list(outputs)

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        for work in self._works:
            work.get_future()
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs


class EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives travel through the broker. CPU tensors only."""

    def __init__(self, client: Client, ranks: tuple[int, ...], name: str) -> None:
        super().__init__(ranks.index(client.rank), len(ranks))
        self._client = client
        self._ranks = ranks
        self._wire_name = name
        self._group_name = name
        self._group_desc = "emulated"
        self._number = 0
        self._messages: dict[tuple[str, int, int], int] = {}
        self._order = threading.RLock()  # numbers have to be sent in their order

    # torch asks for these under both of its naming conventions.
    def getBackendName(self) -> str:
        return "emulated"

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._group_name

    @property
    def group_desc(self) -> str:  # type: ignore[override]
        return self._group_desc

    def _set_group_name(self, name: str) -> None:  # type: ignore[override]
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    def getRank(self) -> int:
        return self._ranks.index(self._client.rank)

    def getSize(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self.getRank()

    def size(self) -> int:
        return self.getSize()

    def shutdown(self) -> None:
        pass  # the connection belongs to emulated_world

    def abort(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"EmulatedGroup({self._group_name!r}, ranks {list(self._ranks)})"

    # ------------------------------------------------------------- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._each(
            _list(tensors),
            lambda tensor: self._issue(
                "all_reduce",
                tensor,
                [tensor],
                lambda raw: _write(tensor, raw),
                op=_reduce_op(opts),
            ),
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (tensor,) = _list(tensors)
        root = self._ranks[opts.rootRank]
        store = (lambda raw: _write(tensor, raw)) if root == self._client.rank else None
        return self._issue("reduce", tensor, [tensor], store, op=_reduce_op(opts), root=root)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (tensor,) = _list(tensors)
        root = self._ranks[opts if isinstance(opts, int) else opts.rootRank]
        mine = root == self._client.rank
        store = None if mine else (lambda raw: _write(tensor, raw))
        return self._issue(
            "broadcast", tensor, [tensor], store, root=root, payload=[tensor] if mine else []
        )

    def allgather(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        outputs, inputs = list(output_lists), _list(input_list)
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        works = [
            self._gather_into("all_gather", out, tensor)
            for out, tensor in zip(outputs, inputs, strict=True)
        ]
        return _together(works, [t for out in outputs for t in out])

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        # Here the outputs come per rank, each with one tensor per input.
        works = [
            self._gather_into("all_gather", [out[i] for out in output_lists], tensor)
            for i, tensor in enumerate(input_list)
        ]
        return _together(works, [t for out in output_lists for t in out])

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> EmulatedWork:
        _check_numel("all_gather", output, input.numel() * self.getSize())
        return self._issue("all_gather", input, [output], lambda raw: _write(output, raw))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return _together(works, outputs)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None, *_: Any) -> Any:
        outputs, input_lists = _list(outputs), list(input_lists)
        if input_lists and isinstance(input_lists[0], torch.Tensor):
            input_lists = [input_lists]
        works = [
            self._reduce_parts(output, list(parts), _reduce_op(opts))
            for output, parts in zip(outputs, input_lists, strict=True)
        ]
        return _together(works, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> EmulatedWork:
        _check_numel("reduce_scatter", input, output.numel() * self.getSize())
        return self._reduce_parts(output, [input], _reduce_op(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [
            self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)
        ]
        return _together(works, outputs)

    def gather(self, output_lists: Any, input_list: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (tensor,) = _list(input_list)
        root = self._ranks[opts.rootRank]
        if root != self._client.rank:
            return self._issue("gather", tensor, [], None, root=root)
        return self._gather_into("gather", list(output_lists[0]), tensor, root=root)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (output,) = _list(outputs)
        root = self._ranks[opts.rootRank]
        parts: list[torch.Tensor] = []
        if root == self._client.rank:
            parts = list(input_lists[0])
            _check_parts("scatter", parts, self.getSize(), output)
        return self._issue(
            "scatter", output, [output], lambda raw: _write(output, raw), root=root, payload=parts
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> EmulatedWork:
        return self._issue(
            "all_to_all",
            input,
            [output],
            lambda raw: _write(output, raw),
            send=_splits("input", input, input_splits, self.getSize()),
            recv=_splits("output", output, output_splits, self.getSize()),
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        outputs, inputs = _list(outputs), _list(inputs)
        if len(outputs) != self.getSize() or len(inputs) != self.getSize():
            raise ValueError(
                f"all_to_all needs {self.getSize()} tensors in and out, "
                f"got {len(inputs)} and {len(outputs)}"
            )
        return self._issue(
            "all_to_all",
            inputs[0],
            outputs,
            lambda raw: _write_parts(outputs, raw),
            payload=inputs,
            send=[t.numel() for t in inputs],
            recv=[t.numel() for t in outputs],
        )

    def barrier(self, opts: Any = None, *_: Any) -> EmulatedWork:
        return self._issue("barrier", torch.empty(0, dtype=torch.uint8), [], None)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> EmulatedWork:
        (tensor,) = _list(tensors)
        return self._message("send", tensor, self._ranks[dst], tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> EmulatedWork:
        (tensor,) = _list(tensors)
        return self._message("recv", tensor, self._ranks[src], tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> EmulatedWork:
        raise NotImplementedError("the emulated cluster has no recv from any source: give src=")

    # torch 2.11 calls these names, 2.13 those above.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------- parts

    def _each(self, tensors: Tensors, issue: Callable[[torch.Tensor], EmulatedWork]) -> Any:
        return _together([issue(tensor) for tensor in tensors], tensors)

    def _gather_into(
        self, kind: str, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int | None = None
    ) -> EmulatedWork:
        _check_parts(kind, outputs, self.getSize(), tensor)
        return self._issue(kind, tensor, outputs, lambda raw: _write_parts(outputs, raw), root=root)

    def _reduce_parts(self, output: torch.Tensor, parts: Tensors, op: str) -> EmulatedWork:
        if len(parts) != 1:
            _check_parts("reduce_scatter", parts, self.getSize(), output)
        return self._issue(
            "reduce_scatter",
            output,
            [output],
            lambda raw: _write(output, raw),
            op=op,
            payload=parts,
        )

    def _issue(
        self,
        kind: str,
        like: torch.Tensor,
        outputs: Tensors,
        store: Callable[[np.ndarray], None] | None,
        *,
        op: str = "",
        root: int | None = None,
        payload: Tensors | None = None,
        send: Sequence[int] | None = None,
        recv: Sequence[int] | None = None,
    ) -> EmulatedWork:
        """Send this rank's part of a collective; `like` gives the dtype and shape of one part."""
        header: dict[str, Any] = {"t": "issue", **_describe(kind, like, op)}
        header |= {"g": self._wire_name, "r": list(self._ranks)}
        if root is not None:
            header["root"] = root
        if send is not None and recv is not None:
            header |= {"send": list(send), "recv": list(recv)}
        with _disable_current_modes():
            data = _bytes([like] if payload is None else payload, like.dtype)
        with self._order:
            key = f"{self._wire_name}/{self._number}"
            self._client.post(header | {"k": self._number}, data)
            self._number += 1
        return EmulatedWork(self._client, key, outputs, store)

    def _message(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> EmulatedWork:
        header: dict[str, Any] = {"t": "issue", **_describe(kind, tensor, "")}
        header |= {"g": self._wire_name, "r": list(self._ranks), "peer": peer, "tag": tag}
        sends, me = kind == "send", self._client.rank
        path = f"{me}>{peer}" if sends else f"{peer}>{me}"
        with self._order:
            number = self._messages.get((kind, peer, tag), 0)
            self._messages[kind, peer, tag] = number + 1
            with _disable_current_modes():
                data = _bytes([tensor], tensor.dtype) if sends else None
            self._client.post(header, data)
        return EmulatedWork(
            self._client,
            f"{self._wire_name}/{path}/{tag}/{number}",
            [tensor],
            None if sends else (lambda raw: _write(tensor, raw)),
            eager=sends,
            source=-1 if sends else peer,
        )


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _together(works: list[EmulatedWork], outputs: Tensors) -> Any:
    return works[0] if len(works) == 1 else _ManyWorks(works, outputs)


def _reduce_op(opts: Any) -> str:
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    for name, known in _OPS:
        if op == known:
            return name
    raise ValueError(f"the emulated cluster cannot reduce with {op}")


def _describe(kind: str, tensor: torch.Tensor, op: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"{kind}: the emulated cluster carries dense CPU tensors, got "
            f"{tensor.device.type}, {tensor.layout}"
        )
    if dtype not in arrays.NUMPY_DTYPES:
        raise ValueError(f"{kind}: the emulated cluster does not carry {dtype}")
    if op and (reason := arrays.can_reduce(op, dtype)):
        raise ValueError(f"{kind}: {reason}")
    header: dict[str, Any] = {"kind": kind, "dtype": dtype, "shape": list(tensor.shape)}
    return header | ({"op": op} if op else {})


def _bytes(tensors: Tensors, dtype: torch.dtype) -> memoryview | None:
    """The tensors' values one after the other, without a copy where there is one contiguous."""
    flat = [t.detach().resolve_neg().resolve_conj().reshape(-1) for t in tensors if t.numel()]
    if not flat:
        return None
    if any(t.dtype != dtype for t in flat):
        raise ValueError(f"tensors of one collective must have one dtype, got {dtype} and others")
    joined = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
    return wire.view_of(joined.view(torch.uint8).numpy())


def _write(output: torch.Tensor, raw: np.ndarray) -> None:
    if output.numel() == 0:
        return
    values = torch.from_numpy(raw).view(output.dtype)
    # .data: the version counter stays as it is, as for a collective of any other backend.
    output.data.copy_(values.view(output.shape))


def _write_parts(outputs: Tensors, raw: np.ndarray) -> None:
    start = 0
    for output in outputs:
        end = start + output.numel() * output.element_size()
        # A copy, because a part need not start at a multiple of the element's size.
        _write(output, raw[start:end].copy())
        start = end


def _check_numel(kind: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise ValueError(f"{kind}: expected a tensor of {expected} elements, got {tensor.numel()}")


def _check_parts(kind: str, parts: Tensors, count: int, like: torch.Tensor) -> None:
    if len(parts) != count:
        raise ValueError(f"{kind}: expected a list of {count} tensors, got {len(parts)}")
    for index, part in enumerate(parts):
        if part.numel() != like.numel() or part.dtype != like.dtype:
            raise ValueError(
                f"{kind}: tensor {index} of the list is {part.dtype}{list(part.shape)}, "
                f"the other side is {like.dtype}{list(like.shape)}"
            )


def _splits(what: str, tensor: torch.Tensor, splits: Any, count: int) -> list[int]:
    """Elements for each rank; splits count rows, and none means equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 0
    per_row = math.prod(tensor.shape[1:])
    if not splits:
        if rows % count:
            raise ValueError(
                f"all_to_all_single: {rows} rows of the {what} do not divide by {count}"
            )
        splits = [rows // count] * count
    if len(splits) != count or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {what} splits {list(splits)} must be {count} numbers "
            f"that add up to {rows} rows"
        )
    return [size * per_row for size in splits]


def _create(options: Any, _: Any = None) -> EmulatedGroup:
    client = current_client()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return EmulatedGroup(client, ranks, str(options.group_id))


if "EMULATED" not in dist.Backend._plugins:
    dist.Backend.register_backend("emulated", _create, extended_api=True, devices=["cpu"])
