"""A folder of checkpoints: written completely or not at all, checked before they are used.

Failures, and what protects against them:

1. A job dies while it writes. Files go to the folder `step-00000100.writing`. When all files are on
   the disk, rename(2) gives the folder its final name, so a folder with that name is complete.
2. A disk loses or changes bytes later. `manifest.json` has the size and the SHA-256 of every file.
   A checkpoint that does not agree is not loaded; the checkpoint before it is loaded instead.
3. Ranks see different things (one could not write, one cannot read). Ranks exchange what they found
   before any rank continues, so all ranks save or load the same checkpoint, or all raise.

Phases of `save`: open, write, digest, commit. Every phase ends with an exchange between the ranks,
on a separate gloo group, so a save can run in a background thread beside training's collectives.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import shutil
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minidist.checkpoint.saving import CheckpointError, Saving, States, refuse_parts
from minidist.checkpoint.shards import ShardReader, Shards, boxes_to_write
from minidist.checkpoint.snapshot import LOADABLE, snapshot

MANIFEST = "manifest.json"
_FORMAT = 1


class Checkpoints:
    """The checkpoints of one run.

    Every rank makes one after `init_process_group`, calls the same methods in the same order, and
    sees the same folder. In a program without a process group it works alone.

    Args:
        directory: made if it is not there.
        keep: number of undamaged checkpoints that stay: the one just saved and those before it.
            Older ones are deleted after a save. If a run was set back to an earlier step,
            checkpoints of later steps stay until the run reaches these steps.
        timeout_s: how long ranks wait for each other.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: int = 2, timeout_s: float = 600.0
    ) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.group: Any = None  # a separate gloo group
        self.rank, self.world_size = 0, 1
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._saving: Saving | None = None
        self._damaged: set[int] = set()  # steps of damaged checkpoints
        self.directory.mkdir(parents=True, exist_ok=True)

    # -------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        *,
        shared: States | None = None,
        local: States | None = None,
        sharded: Shards | None = None,
    ) -> Path:
        """Write the checkpoint of `step`; returns its folder on every rank.

        Args:
            step: the same on every rank; a checkpoint of this step is replaced.
            shared: state that is the same on every rank; rank 0's is written. Every rank takes it,
                so that a `state_dict` may be collective.
            local: state that differs from rank to rank, e.g. random numbers.
            sharded: name -> `Shard` (or several): this rank's parts of global tensors.

        Raises:
            CheckpointError: on every rank, if any rank failed, also if a state holds a value that
                could not be read again (`snapshot`), or ranks give different steps or see different
                folders. Earlier checkpoints are untouched.
        """
        step = self._begin(step)
        return self._save_files(step, self._snapshot(shared, local, sharded, copy=False))

    def save_async(
        self,
        step: int,
        *,
        shared: States | None = None,
        local: States | None = None,
        sharded: Shards | None = None,
    ) -> Saving:
        """As `save`, but only a copy in memory is made now. One save is under way at a time."""
        step = self._begin(step)
        write = self._snapshot(shared, local, sharded, copy=True)
        self._saving = Saving(lambda: self._save_files(step, write))
        return self._saving

    def save_files(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write(folder)` write files on every rank; make a checkpoint of them."""
        step = self._begin(step)
        return self._save_files(step, write)

    def _begin(self, step: int) -> int:
        """Before a save: no other is under way, and all ranks agree on the step."""
        self._finish_saving()
        given = self._together("save", lambda: operator.index(step))
        if min(given) != max(given) or given[0] < 0:
            raise CheckpointError(
                f"could not save: expected one step, at least 0, on all ranks, got {given}",
                rank=self.rank,
            )
        return given[0]

    def _finish_saving(self) -> None:
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                f"{self.directory}: this object was made before init_process_group, so every rank "
                "would read and write as if it were alone; make it after",
                rank=dist.get_rank(),
            )
        before, self._saving = self._saving, None
        if before is not None:
            before.wait()

    def _snapshot(
        self, shared: States | None, local: States | None, sharded: Shards | None, *, copy: bool
    ) -> Callable[[Path], None]:
        files: dict[str, Any] = {}

        def take() -> None:
            for name, part in (shared or {}).items():
                refuse_parts(name, part)
            for kind, parts in (("local", local), ("shared", shared)):
                if parts is None:
                    continue
                taken = {part: each.state_dict() for part, each in parts.items()}
                if kind == "local" or self.rank == 0:
                    name = "shared.pt" if kind == "shared" else f"local-{self.rank}.pt"
                    files[name] = snapshot(taken, kind, copy=copy)

        self._together("take the states", take)
        # Several ranks may hold the same part of a tensor: one of them writes it.
        boxes, index = boxes_to_write(sharded or {}, self.rank, self._exchange)
        tensors = {key: tensor.cpu() for key, tensor in boxes.items()}  # copies already

        def write(folder: Path) -> None:
            for name, state in files.items():
                torch.save(state, folder / name)
            if tensors:
                torch.save(tensors, folder / f"shards-{self.rank}.pt")
            if self.rank == 0:
                (folder / "index.json").write_text(json.dumps(index))

        return write

    def _save_files(self, step: int, write: Callable[[Path], None]) -> Path:
        final = self.directory / f"step-{step:08d}"
        folder = final.with_suffix(".writing")

        def open_folder() -> None:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)

        def write_here() -> None:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder} is not there, which rank 0 has just made: every rank needs the same "
                    "directory, on a disk that all of them see"
                )
            write(folder)

        def digest() -> dict[str, Any]:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            mine = files[self.rank :: self.world_size]
            return {str(path.relative_to(folder)): _digest(path, sync=True) for path in mine}

        def commit() -> None:
            if self.rank != 0:
                return
            listed = {name: entry for part in digests for name, entry in part.items()}
            manifest = {
                "format": _FORMAT,
                "step": step,
                "world_size": self.world_size,
                "files": dict(sorted(listed.items())),
            }
            path = folder / MANIFEST
            path.write_text(json.dumps(manifest, indent=1))
            _sync(path)
            _sync(folder)
            if final.exists():  # a run that was set back writes the same step again
                old = final.with_suffix(".replaced")
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            folder.rename(final)
            _sync(self.directory)
            self._delete_old(step)

        try:
            self._together(f"open {folder}", open_folder)
            self._together(f"write {folder}", write_here)
            digests = self._together(f"read back {folder}", digest)
            self._together(f"complete {folder}", commit)
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return final

    def _delete_old(self, newest: int) -> None:
        for path in self.directory.glob("step-*.replaced"):
            shutil.rmtree(path, ignore_errors=True)
        self._damaged.discard(newest)
        before = [step for step in self.steps() if step <= newest]
        whole = [step for step in before if step not in self._damaged]
        for step in set(before) - set(whole[-self.keep :]):
            shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)

    def _recover(self) -> None:
        """Restore the old checkpoint of a step if a job died while it replaced that step."""
        for old in self.directory.glob("step-*.replaced") if self.rank == 0 else ():
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))

    # -------------------------------------------------------------------- load

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged ones included, oldest first."""
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> tuple[int, Path] | None:
        """Step and folder of the newest checkpoint that every rank finds undamaged, or None.

        Each rank reads a part of the files and compares them with the manifest. A damaged
        checkpoint is skipped, with a warning on rank 0.
        """
        self._finish_saving()
        self._recover()
        seen = self._exchange(self.steps())
        for step in sorted(set().union(*seen), reverse=True):
            folder = self.directory / f"step-{step:08d}"
            problems = [text for text in self._exchange(self._problem(folder)) if text]
            if not problems:
                return step, folder
            self._damaged.add(step)
            if self.rank == 0:
                warnings.warn(
                    f"checkpoint of step {step} is damaged and not used: {problems[0]}",
                    stacklevel=2,
                )
        return None

    def load(
        self,
        *,
        shared: States | None = None,
        local: States | None = None,
        sharded: Shards | None = None,
        any_world_size: bool = False,
    ) -> int | None:
        """Load the newest undamaged checkpoint into the objects given; returns its step, or None.

        Tensors of `sharded` are filled in place, from a checkpoint of any number of ranks and any
        layout. `local` needs the world size that it was saved with; with `any_world_size`, it is
        left out if the world size differs.

        Raises:
            CheckpointError: on every rank, if any rank could not load. The objects may then hold
                a mixture of states and must not be trained further.
        """
        found = self.latest()
        if found is None:
            return None
        step, folder = found

        def read() -> None:
            for name, part in (shared or {}).items():
                refuse_parts(name, part)
            saved_by = json.loads((folder / MANIFEST).read_text())["world_size"]
            own = local if saved_by == self.world_size else None
            if local and not own and not any_world_size:
                raise CheckpointError(
                    f"each rank's own state was saved by {saved_by} ranks and cannot be given to "
                    f"{self.world_size}; any_world_size=True goes on without it"
                )
            for name, parts in (("shared.pt", shared), (f"local-{self.rank}.pt", own)):
                if parts:
                    _restore(folder / name, parts)
            if sharded:
                ShardReader(folder).fill(sharded)

        self._together(f"load {folder}", read)
        return step

    def _problem(self, folder: Path) -> str:
        """What is wrong with this rank's part of a checkpoint's files; empty if nothing."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["format"] != _FORMAT:
                return f"its format is {manifest['format']}, this program reads {_FORMAT}"
            names = sorted(manifest["files"])[self.rank :: self.world_size]
            for name in names:
                expected = manifest["files"][name]
                got = _digest(folder / name)
                if got != expected:
                    return f"{folder / name}: expected {expected}, got {got}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{folder}: {error!r}"
        return ""

    # ------------------------------------------------------------------- ranks

    def _exchange(self, value: Any) -> list[Any]:
        """`value` of every rank, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _together(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; all of them return, or all of them raise."""
        result: Any = None
        error: str | None = None
        try:
            result = work()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        outcomes = self._exchange((result, error))
        failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
        if failed:
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise CheckpointError(f"could not {what}: {texts}", rank=self.rank)
        return [result for result, _ in outcomes]


def _restore(path: Path, parts: States) -> None:
    with torch.serialization.safe_globals(LOADABLE):
        saved = torch.load(path, map_location="cpu", weights_only=True)
    missing = sorted(set(parts) - set(saved))
    if missing:
        raise CheckpointError(f"{path} has {sorted(saved)}, but not {missing}")
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def _digest(path: Path, *, sync: bool = False) -> dict[str, Any]:
    if sync:
        _sync(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"num_bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
