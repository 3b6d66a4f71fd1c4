"""A few parameters as one flat line; each rank keeps one part of the line.

    shard        [ w w w w w ]  rank 0      [ w w b b _ ]  rank 1         always there, padded
    full         [ w w w w w w w b b _ ]                                  only while computing
    params       w -> view of full    b -> view of full                   what the layers use
    pieces       w -> view of shard   b -> view of shard                  what the optimiser updates

A line may also be whole on every rank (norms, by choice). `full` is then the shard itself, nothing
is gathered, and every rank's row of gradients is the whole line.

All-gather writes directly into `full`. The parameters are views of `full`, so nothing is copied
out. Freeing `full` keeps its (empty) storage object. Autograd has saved views of this storage for
the backward pass. When the next all-gather fills the same storage again, these views show the
parameters again.

The layout is PyTorch FSDP's flat parameter (arXiv 2304.11277, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.parallel.zero.exchange import GradientBucket, Pending, gather_rows
from minidist.parallel.zero.partition import Piece, by_element, everywhere
from minidist.parallel.zero.piece_gradient import PieceGradient
from minidist.precision.clip import note_shard_group, note_whole
from minidist.unsupported import Unsupported

HOOKS = Unsupported(
    "Zero3",
    "hooks on parameters (register_hook, register_post_accumulate_grad_hook, those of a DDP)",
    instead="change the gradients of the pieces after backward, or put hooks on modules",
)


def has_hooks(param: Tensor) -> bool:
    """Whether a hook waits for this parameter's gradient."""
    late = getattr(param, "_post_accumulate_grad_hooks", None)
    return bool(param._backward_hooks) or bool(late)


@dataclass(frozen=True)
class Slot:
    """Where a parameter is registered: `module._parameters[name]`. Tied ones have several slots."""

    module: nn.Module
    name: str

    def put(self, param: nn.Parameter) -> None:
        # Not setattr, because this runs often and must not run a module's __setattr__.
        self.module._parameters[self.name] = param

    def show(self, param: nn.Parameter) -> None:
        """Let `module.name` be `param`; `module.parameters()` still returns what was put."""
        self.module.__dict__[self.name] = param

    def hide(self) -> None:
        """End `show`."""
        self.module.__dict__.pop(self.name, None)


def _cut(param: nn.Parameter, data: Tensor) -> nn.Parameter:
    """The parameter with `data` as its data; a new one where it had none (meta device)."""
    if param.is_meta:
        param = nn.Parameter(data, param.requires_grad)
    param.data = data
    return param


class FlatShard:
    """Parameters of one dtype, sharded over a group.

    Args:
        params: whole parameters. They become the pieces: the same objects, with less data, so that
            an optimiser that holds them already holds the pieces. Those on the meta device are
            replaced, and `write` must give their values.
        slots: for each parameter, the places where it is registered.
        device: where to compute.
        policy: any object; its optional `param_dtype` is the dtype to compute in, its optional
            `reduce_dtype` is the dtype in which gradients are sent.
        offload: keep the shard, its gradient, and so the optimiser's state in CPU memory.
        is_whole: every rank keeps the whole line, in the dtype of the parameters.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        slots: Sequence[Sequence[Slot]],
        group: dist.ProcessGroup,
        device: torch.device,
        policy: Any = None,
        offload: bool = False,
        is_whole: bool = False,
    ) -> None:
        self.is_whole = is_whole
        policy, offload = (None, False) if is_whole else (policy, offload)
        self.group = group
        self.device = device
        self.slots = slots
        self.shapes = [param.shape for param in params]
        dtype = params[0].dtype
        compute_dtype = getattr(policy, "param_dtype", None) or dtype
        reduce_dtype = getattr(policy, "reduce_dtype", None) or compute_dtype
        cut_line = everywhere if is_whole else by_element
        self.layout = cut_line([p.numel() for p in params], dist.get_world_size(group))
        rank = dist.get_rank(group)
        size = self.layout.sizes[rank]
        self._row = slice(rank * size, (rank + 1) * size)

        # The shard, and the optimiser's view of it: one piece per parameter. A piece is empty if
        # other ranks have the whole parameter.
        home = torch.device("cpu") if offload else device
        self.shard = torch.zeros(
            size, dtype=dtype, device=home, pin_memory=home != device and device.type == "cuda"
        )
        own = {piece.index: piece for piece in self.layout.rows[rank]}
        self.cuts = [own.get(i, Piece(i, 0, 0, 0)) for i in range(len(params))]
        whole = [param.detach() for param in params]
        self.pieces = []
        for cut, param in zip(self.cuts, params, strict=True):
            data = self.shard[cut.offset : cut.offset + cut.numel]
            self.pieces.append(_cut(param, data.view(param.shape) if is_whole else data))
            (note_whole if is_whole else note_shard_group)(self.pieces[-1], group)

        # The full line, and the layers' view of it. `.data` gives the views their own version
        # counter. Otherwise autograd would treat the next all-gather as a change of saved tensors.
        self.full = self.shard
        if not is_whole:
            self.full = torch.empty(sum(self.layout.sizes), dtype=compute_dtype, device=device)
        line = self.full.data
        self.params = [
            nn.Parameter(line[start : start + numel].view(shape), param.requires_grad)
            for start, numel, shape, param in zip(
                self.layout.starts, self.layout.numels, self.shapes, params, strict=True
            )
        ]
        self._num_bytes = self.full.untyped_storage().nbytes()
        self._pending: Pending | None = None
        self.is_full = False
        self.gradients = GradientBucket(self.layout, group, device, reduce_dtype, dtype)
        for index, value in enumerate(whole):
            if not value.is_meta:
                self.write(index, value)
        self.free()

    @torch.no_grad()
    def write(self, index: int, value: Tensor) -> None:
        """Copy this rank's elements of a whole parameter into the shard."""
        cut = self.cuts[index]
        piece = self.pieces[index]
        piece.copy_(value.reshape(-1)[cut.begin : cut.end].view(piece.shape))

    # -- parameters: shard -> full -> freed ----------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Start the all-gather, unless it is in progress or done."""
        if self.is_full or self._pending is not None:
            return
        self._check_pieces()
        if self.is_whole:
            return
        self.full.untyped_storage().resize_(self._num_bytes)
        row = self.shard.to(self.device, self.full.dtype, non_blocking=True)
        self._pending = gather_rows(self.full, row, self.layout.sizes, self.group)

    def _check_pieces(self) -> None:
        """Raises ValueError if a piece is no longer the memory that is gathered."""
        for piece, cut, slots in zip(self.pieces, self.cuts, self.slots, strict=True):
            begin = self.shard.data_ptr() + cut.offset * self.shard.element_size()
            if piece.dtype != self.shard.dtype or (cut.numel and piece.data_ptr() != begin):
                raise ValueError(
                    f"Zero3: {type(slots[0].module).__name__}.{slots[0].name} was converted, moved "
                    f"or given other data after sharding (.to(), .half(), .data = ...): expected "
                    f"the shard's memory, {self.shard.dtype} on {self.shard.device}, got "
                    f"{piece.dtype} on {piece.device} on {named_rank()}; convert the model before "
                    "Zero3(model)"
                )
            if has_hooks(piece):
                raise HOOKS.error(
                    f"{type(slots[0].module).__name__}.{slots[0].name} has a hook, which no "
                    f"gradient would reach, on {named_rank()}"
                )

    def wait(self) -> None:
        """Wait for the all-gather, and let the layers use the whole parameters."""
        if self.is_full:
            return
        self.gather()
        if self._pending is not None:
            with torch.no_grad():
                self._pending.wait()
        self._pending = None
        self.is_full = True
        for param, piece, slots in zip(self.params, self.pieces, self.slots, strict=True):
            if param.requires_grad != piece.requires_grad:  # frozen or unfrozen meanwhile
                param.requires_grad_(piece.requires_grad)
            for slot in slots:
                slot.show(param)

    def expose(self) -> None:
        """After `wait`: let `module.parameters()` also return the whole parameters."""
        for param, slots in zip(self.params, self.slots, strict=True):
            for slot in slots:
                slot.put(param)

    def free(self) -> None:
        """Free the full line; the layers have their pieces as parameters again."""
        if self._pending is not None:  # prefetched, but then not needed
            self._pending.wait()
            self._pending = None
        if not self.is_whole:
            self.full.untyped_storage().resize_(0)
        self.is_full = False
        for piece, slots in zip(self.pieces, self.slots, strict=True):
            for slot in slots:
                slot.hide()
                slot.put(piece)

    @property
    def is_sharded(self) -> bool:
        return not self.is_full and self._pending is None

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's row of the full line into the shard, after a change of the full line."""
        if not self.is_full:
            raise RuntimeError("write_back: the parameters have been freed meanwhile")
        if not self.is_whole:
            self.shard.copy_(self.full[self._row])

    # -- gradients: whole -> bucket -> shard ---------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.params)

    @property
    def is_trainable(self) -> bool:
        return any(piece.requires_grad for piece in self.pieces)

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients of the whole parameters into the bucket."""
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self.gradients.add(index, param.grad)
                param.grad = None

    @torch.no_grad()
    def keep(self) -> None:
        """Wait for the reduce-scatter, and add its result to the gradients of the pieces."""
        row, present = self.gradients.finish()
        row = row.to(self.shard.device)
        for piece, has_gradient in zip(self.gradients.pieces, present, strict=True):
            if has_gradient:
                mine = self.pieces[piece.index]
                gradient = row[piece.offset : piece.offset + piece.numel].view(mine.shape)
                if not self.is_whole and dist.get_world_size(self.group) > 1:
                    gradient = gradient.as_subclass(PieceGradient)
                mine.grad = gradient if mine.grad is None else mine.grad.add_(gradient)
