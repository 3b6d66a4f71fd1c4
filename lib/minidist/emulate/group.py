"""The process group of the emulated cluster: what torch.distributed calls for each collective."""

# torch declares overloads of these methods; each method here takes the arguments of all overloads.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from minidist.device import NamedGroup
from minidist.emulate.client import Client
from minidist.emulate.handles import EmulatedWork, InFlight, ManyWorks
from minidist.emulate.tensors import (
    Tensors,
    as_list,
    check_numel,
    check_parts,
    describe,
    reduce_op,
    split_sizes,
    to_bytes,
    write,
    write_parts,
)


class EmulatedGroup(NamedGroup):
    """A process group whose collectives travel through the broker. CPU tensors only."""

    def __init__(self, client: Client, ranks: tuple[int, ...], name: str) -> None:
        super().__init__(ranks.index(client.rank), len(ranks), name, "emulated")
        self._client = client
        self._ranks = ranks
        self._wire_name = name
        self._number = 0
        self._messages: dict[tuple[str, int, int], int] = {}
        self._order = threading.RLock()  # collectives must be sent in the order of their numbers

    def getRank(self) -> int:
        return self._ranks.index(self._client.rank)

    def getSize(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self.getRank()

    def size(self) -> int:
        return self.getSize()

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        return [torch.device("cpu")]  # torch sends objects and state dicts from this device

    def __repr__(self) -> str:
        return f"EmulatedGroup({self._group_name!r}, ranks {list(self._ranks)})"

    # ------------------------------------------------------------- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._each(
            as_list(tensors),
            lambda tensor: self._issue(
                "all_reduce",
                tensor,
                [tensor],
                lambda raw: write(tensor, raw),
                op=reduce_op(opts),
            ),
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (tensor,) = as_list(tensors)
        root = self._ranks[opts.rootRank]
        store = (lambda raw: write(tensor, raw)) if root == self._client.rank else None
        return self._issue("reduce", tensor, [tensor], store, op=reduce_op(opts), root=root)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (tensor,) = as_list(tensors)
        root = self._ranks[opts if isinstance(opts, int) else opts.rootRank]
        mine = root == self._client.rank
        store = None if mine else (lambda raw: write(tensor, raw))
        return self._issue(
            "broadcast", tensor, [tensor], store, root=root, payload=[tensor] if mine else []
        )

    def allgather(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        outputs, inputs = list(output_lists), as_list(input_list)
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        works = [
            self._gather_into("all_gather", out, tensor)
            for out, tensor in zip(outputs, inputs, strict=True)
        ]
        return _together(works, [t for out in outputs for t in out])

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        # Here there is one output list per rank, each with one tensor per input.
        works = [
            self._gather_into("all_gather", [out[i] for out in output_lists], tensor)
            for i, tensor in enumerate(input_list)
        ]
        return _together(works, [t for out in output_lists for t in out])

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> EmulatedWork:
        check_numel("all_gather", output, input.numel() * self.getSize())
        return self._issue("all_gather", input, [output], lambda raw: write(output, raw))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return _together(works, outputs)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None, *_: Any) -> Any:
        outputs, input_lists = as_list(outputs), list(input_lists)
        if input_lists and isinstance(input_lists[0], torch.Tensor):
            input_lists = [input_lists]
        works = [
            self._reduce_parts(output, list(parts), reduce_op(opts))
            for output, parts in zip(outputs, input_lists, strict=True)
        ]
        return _together(works, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> EmulatedWork:
        check_numel("reduce_scatter", input, output.numel() * self.getSize())
        return self._reduce_parts(output, [input], reduce_op(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [
            self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)
        ]
        return _together(works, outputs)

    def gather(self, output_lists: Any, input_list: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (tensor,) = as_list(input_list)
        root = self._ranks[opts.rootRank]
        if root != self._client.rank:
            return self._issue("gather", tensor, [], None, root=root)
        return self._gather_into("gather", list(output_lists[0]), tensor, root=root)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        (output,) = as_list(outputs)
        root = self._ranks[opts.rootRank]
        parts: list[torch.Tensor] = []
        if root == self._client.rank:
            parts = list(input_lists[0])
            check_parts("scatter", parts, self.getSize(), output)
        return self._issue(
            "scatter", output, [output], lambda raw: write(output, raw), root=root, payload=parts
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
            lambda raw: write(output, raw),
            send=split_sizes("input", input, input_splits, self.getSize()),
            recv=split_sizes("output", output, output_splits, self.getSize()),
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> EmulatedWork:
        outputs, inputs = as_list(outputs), as_list(inputs)
        if len(outputs) != self.getSize() or len(inputs) != self.getSize():
            raise ValueError(
                f"all_to_all needs {self.getSize()} tensors in and out, "
                f"got {len(inputs)} and {len(outputs)}"
            )
        return self._issue(
            "all_to_all",
            inputs[0],
            outputs,
            lambda raw: write_parts(outputs, raw),
            payload=inputs,
            send=[t.numel() for t in inputs],
            recv=[t.numel() for t in outputs],
        )

    def barrier(self, opts: Any = None, *_: Any) -> EmulatedWork:
        return self._issue("barrier", torch.empty(0, dtype=torch.uint8), [], None)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> EmulatedWork:
        (tensor,) = as_list(tensors)
        return self._message("send", tensor, self._ranks[dst], tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> EmulatedWork:
        (tensor,) = as_list(tensors)
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
        check_parts(kind, outputs, self.getSize(), tensor)
        return self._issue(kind, tensor, outputs, lambda raw: write_parts(outputs, raw), root=root)

    def _reduce_parts(self, output: torch.Tensor, parts: Tensors, op: str) -> EmulatedWork:
        if len(parts) != 1:
            check_parts("reduce_scatter", parts, self.getSize(), output)
        return self._issue(
            "reduce_scatter",
            output,
            [output],
            lambda raw: write(output, raw),
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
        header: dict[str, Any] = {"t": "issue", **describe(kind, like, op)}
        header |= {"g": self._wire_name, "r": list(self._ranks), "st": self._client.stream}
        if root is not None:
            header["root"] = root
        if send is not None and recv is not None:
            header |= {"send": list(send), "recv": list(recv)}
        payload = [like] if payload is None else payload
        with _disable_current_modes():
            data = to_bytes(payload, like.dtype)
        sent = InFlight(kind, payload, data)
        with self._order:
            key = f"{self._wire_name}/{self._number}"
            self._client.post(header | {"k": self._number}, data)
            self._number += 1
        return EmulatedWork(self._client, key, outputs, store, sent=sent)

    def _message(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> EmulatedWork:
        header: dict[str, Any] = {"t": "issue", **describe(kind, tensor, "")}
        header |= {"g": self._wire_name, "r": list(self._ranks), "st": self._client.stream}
        header |= {"peer": peer, "tag": tag}
        sends, me = kind == "send", self._client.rank
        path = f"{me}>{peer}" if sends else f"{peer}>{me}"
        with self._order:
            number = self._messages.get((kind, peer, tag), 0)
            self._messages[kind, peer, tag] = number + 1
            with _disable_current_modes():
                data = to_bytes([tensor], tensor.dtype) if sends else None
            self._client.post(header, data)
        return EmulatedWork(
            self._client,
            f"{self._wire_name}/{path}/{tag}/{number}",
            [tensor],
            None if sends else (lambda raw: write(tensor, raw)),
            sent=InFlight(kind, [tensor], data) if sends else None,
            eager=sends,
            source=-1 if sends else peer,
        )


def _together(works: list[EmulatedWork], outputs: Tensors) -> Any:
    return works[0] if len(works) == 1 else ManyWorks(works, outputs)
