"""State dicts of a ZeRO-3 model and its optimiser: full, sharded, and from N ranks to M.

    full       the state dict that the model would have unsharded; collective
    sharded    the part of this rank; no communication; `save_sharded` writes a file per rank

Any number of ranks can read both. From a folder of shards, a rank reads its elements directly from
the files, one parameter at a time, so it can load a model that is too large for one rank.

Gathering is a collective: ALL ranks call `full_state_dict`, and then rank 0 saves. If the call is
under `if rank == 0:`, rank 0 waits for ever, because the other ranks do not call it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.parallel.zero.flat import FlatShard
from minidist.parallel.zero.partition import Piece
from minidist.parallel.zero.stage1 import ShardedOptimizer
from minidist.parallel.zero.state import (
    Cut,
    cut_optimizer_state,
    gather_parts,
    make_part,
    merge_optimizer_parts,
    merge_parts,
    pack_optimizer_state,
)


class StateDicts:
    """The part of `Zero3` that saves and loads."""

    def __init__(
        self, model: nn.Module, flats: Sequence[FlatShard], group: dist.ProcessGroup
    ) -> None:
        self.model = model
        self.flats = flats
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._homes = {
            piece: (flat, index) for flat in flats for index, piece in enumerate(flat.pieces)
        }
        # Every name of every parameter; a tied parameter has several names.
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._names = list(model.state_dict(keep_vars=True))
        self._buffer_names = [name for name in self._names if name not in self._named]

    def _cut(self, piece: Tensor, number: int = 0) -> Cut:
        flat, index = self._homes[piece]  # pyright: ignore[reportArgumentType]
        at = flat.cuts[index]
        return Cut(number, flat.shapes[index], at.begin, at.end)

    def cuts_of(self, piece: Tensor) -> list[Cut] | None:
        """What each rank of the group holds of a parameter; None if it is none of this model."""
        if piece not in self._homes:
            return None
        flat, index = self._homes[piece]  # pyright: ignore[reportArgumentType]
        shape = flat.shapes[index]
        found = [
            next((each for each in row if each.index == index), Piece(index, 0, 0, 0))
            for row in flat.layout.rows
        ]
        return [Cut(index, shape, each.begin, each.end) for each in found]

    # -- the model -----------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model, on the CPU, without communication."""
        parts = {}
        for name, piece in self._named.items():
            cut = self._cut(piece)
            parts[name] = make_part(piece, cut.shape, cut.begin, cut.end)
        buffers = dict(self.model.named_buffers())
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "parameters": parts,
            "buffers": {name: buffers[name].detach().cpu().clone() for name in self._buffer_names},
        }

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The `state_dict()` that the unsharded model would have, on the CPU.

        Collective: every rank must call it; with `rank0_only` the other ranks get an empty dict.
        """
        merged = gather_parts(self.sharded_state_dict(), _merge_models, self.group, rank0_only)
        return {name: merged[name] for name in self._names if merged}

    def load_full_state_dict(
        self, state_dict: Mapping[str, Tensor], *, from_rank0: bool = False
    ) -> None:
        """Load the state dict of an unsharded model.

        Args:
            state_dict: the same on all ranks, unless `from_rank0`.
            from_rank0: use only rank 0's state dict, and send it to the other ranks one tensor at a
                time. The call is then collective.

        Raises:
            ValueError: names or shapes do not fit; with `from_rank0` raised on all ranks.
        """
        problem = None if from_rank0 and self.rank else self._misfit(state_dict)
        if from_rank0:
            first = dist.get_global_rank(self.group, 0)
            problems = [problem]
            dist.broadcast_object_list(problems, src=first, group=self.group)
            problem = problems[0]
        if problem is not None:
            raise ValueError(f"[rank {self.rank}] load_full_state_dict: {problem}")
        for name in (*self._named, *self._buffer_names):
            value = state_dict.get(name)
            self._load_tensor(name, self._from_rank0(name, value) if from_rank0 else value)

    def _misfit(self, state_dict: Mapping[str, Tensor]) -> str | None:
        names = [*self._named, *self._buffer_names]
        missing = [name for name in names if name not in state_dict]
        unexpected = [name for name in state_dict if name not in names]
        if missing or unexpected:
            return f"missing {missing}, unexpected {unexpected}"
        for name, piece in self._named.items():
            expected, got = tuple(self._cut(piece).shape), tuple(state_dict[name].shape)
            if expected != got:
                return f"{name}: expected shape {expected}, got {got}"
        return None

    def _from_rank0(self, name: str, value: Tensor | None) -> Tensor:
        if name in self._named:
            like = self._named[name]
            shape, device = self._cut(like).shape, self._homes[like][0].device
        else:
            like = self.model.get_buffer(name)
            shape, device = like.shape, like.device
        if self.rank == 0:
            assert value is not None
            sent = value.to(device, like.dtype).contiguous()
        else:
            sent = torch.empty(shape, dtype=like.dtype, device=device)
        dist.broadcast(sent, src=dist.get_global_rank(self.group, 0), group=self.group)
        return sent

    @torch.no_grad()
    def _load_tensor(self, name: str, value: Any) -> None:
        if name in self._named:
            flat, index = self._homes[self._named[name]]
            flat.write(index, value)
        else:
            self.model.get_buffer(name).copy_(value)

    # -- the optimiser -------------------------------------------------------------------------

    def sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's part of the optimiser's state, on the CPU, without communication."""
        if isinstance(optimizer, ShardedOptimizer):  # WholeOptimizer: its parts are parameters
            return optimizer.state_dict()
        part = pack_optimizer_state(
            optimizer.param_groups, optimizer.state, self._optimizer_cuts(optimizer)
        )
        return {"rank": self.rank, "world_size": self.world_size, **part}

    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The state dict of the same optimiser over the unsharded model, on the CPU. Collective."""
        part = self.sharded_optimizer_state_dict(optimizer)
        return gather_parts(part, merge_optimizer_parts, self.group, rank0_only)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load a full state dict (the same on all ranks), or this rank's own part."""
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.load_state_dict(state_dict)
        else:
            cuts = self._optimizer_cuts(optimizer)
            cut_optimizer_state(
                state_dict, optimizer, optimizer.param_groups, cuts, self.rank, self.world_size
            )

    def _optimizer_cuts(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, Cut]:
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        unknown = sum(piece not in self._homes for piece in pieces)
        if unknown:
            raise ValueError(
                f"[rank {self.rank}] {unknown} of the optimiser's {len(pieces)} parameters are not "
                "pieces of this model; was it made for a different model?"
            )
        return {piece: self._cut(piece, number) for number, piece in enumerate(pieces)}

    # -- folders of shards ---------------------------------------------------------------------

    def save_sharded(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Write this rank's file into a folder that all ranks share. Collective."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"model": self.sharded_state_dict()}
        if optimizer is not None:
            content["optimizer"] = self.sharded_optimizer_state_dict(optimizer)
        path = folder / f"rank{self.rank:05d}-of-{self.world_size:05d}.pt"
        # Save under a temporary name first, so that the file is either complete or absent.
        torch.save(content, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        dist.barrier(group=self.group)

    def load_sharded(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Load what any number of ranks have saved with `save_sharded`.

        Raises:
            ValueError: the folder has no shards, shards of several saves, or not the shards of all
                ranks; or the checkpoint belongs to a different model.
        """
        files = sorted(Path(folder).glob("rank*-of-*.pt"))
        worlds = {path.stem.split("-of-")[1] for path in files}
        if len(worlds) != 1 or len(files) != int(next(iter(worlds))):
            raise ValueError(
                f"[rank {self.rank}] {folder}: expected the files of all ranks of one save, got "
                f"{[path.name for path in files]}"
            )
        contents = [torch.load(path, mmap=True, weights_only=True) for path in files]
        models = [content["model"] for content in contents]
        if set(models[0]["parameters"]) != set(self._named):
            raise ValueError(f"[rank {self.rank}] {folder}: a checkpoint of a different model")
        for name in self._named:
            merged = merge_parts([model["parameters"][name] for model in models])
            self._load_tensor(name, merged["data"])
        for name in self._buffer_names:
            self._load_tensor(name, models[0]["buffers"][name])
        if optimizer is not None:
            parts = [content["optimizer"] for content in contents]
            state = {"state": _Merging(parts), "param_groups": parts[0]["param_groups"]}
            self.load_optimizer_state_dict(optimizer, state)


class _Merging(Mapping[int, dict[str, Any]]):
    """The full state of an optimiser; merges the state of a parameter only on access."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self._parts = [part["state"] for part in parts]

    def __getitem__(self, number: int) -> dict[str, Any]:
        found = [part[number] for part in self._parts if number in part]
        if not found:
            raise KeyError(number)
        return merge_parts(found)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({number for part in self._parts for number in part}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _merge_models(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    names = parts[0]["parameters"]
    params = {n: merge_parts([part["parameters"][n] for part in parts])["data"] for n in names}
    return {**params, **parts[0]["buffers"]}
