"""What a rank of a hybrid trainer holds, and which of its elements count on this rank.

A tensor of the unsplit GPT may exist several times (on all dp ranks; a norm's weight on all tp
ranks; a tied embedding at both ends of a pipeline), or in pieces. Therefore this module says

- what this rank **updates**: `held`. With ZeRO-1 these are some whole parameters, with ZeRO-2 and
  -3 some elements of all parameters, otherwise every parameter of the rank's stages;
- what **counts** on this rank, so that every element counts on exactly one rank: `counts`. A sum
  over all ranks (the norm of the gradients) is then right, although some ranks hold copies.

Parts have the names, shapes and offsets of the unsplit model, so any layout of ranks can read a
checkpoint that a different layout has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minidist.cost.parallelism import ParallelismConfig
from minidist.mesh import Mesh
from minidist.parallel.hybrid.parts import Held, Part, join_parts
from minidist.parallel.hybrid.stage import HybridStage
from minidist.parallel.tensor import sharded_parameters
from minidist.parallel.zero import ShardedOptimizer, Zero3

_STATES = ("exp_avg", "exp_avg_sq")  # AdamW's states with one number per element


class HybridState:
    """The part of `HybridTrainer` that knows what each rank holds, for clipping and checkpoints."""

    def __init__(
        self,
        stages: Sequence[HybridStage],
        mesh: Mesh,
        config: ParallelismConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        zero3: Zero3 | None,
    ) -> None:
        self.mesh, self.config = mesh, config
        self.num_updates = 0
        self._stages, self._zero3 = stages, zero3
        self._is_tied = stages[0].config.tied
        self._whole = [
            Held(name, p, tuple(p.shape), 0, p.numel(), self._splits(stage).get(name))
            for stage in stages
            for name, p in stage.named_parameters()
        ]
        self.held: list[Held] = []
        self._optimizer_of: dict[Tensor, torch.optim.Optimizer] = {}
        for optimizer in optimizers:
            for held in self._held_by(optimizer):
                self.held.append(held)
                self._optimizer_of[held.tensor] = optimizer

    def _held_by(self, optimizer: torch.optim.Optimizer) -> Iterator[Held]:
        whole = {held.tensor: held for held in self._whole}
        if self._zero3 is not None:
            for flat in self._zero3.flats:
                for piece, shape, cut in zip(flat.pieces, flat.shapes, flat.cuts, strict=True):
                    held = whole[piece]
                    yield Held(held.name, piece, tuple(shape), cut.begin, cut.end, held.split)
        elif isinstance(optimizer, ShardedOptimizer):
            for bucket in optimizer.buckets:
                cuts = bucket.layout.rows[optimizer.rank]
                for piece, cut in zip(bucket.pieces, cuts, strict=True):
                    held = whole[bucket.params[cut.index]]
                    yield Held(held.name, piece, held.shape, cut.begin, cut.end, held.split)
        else:
            yield from self._whole

    def _splits(self, stage: HybridStage) -> dict[str, tuple[int, int]]:
        """Name -> (dimension, whole size) of the parameters of which ranks hold parts."""
        return sharded_parameters(stage)

    @cached_property
    def _place(self) -> int:
        """Which of these parts this rank holds."""
        return self.mesh.coordinate("tp")

    @cached_property
    def _is_first_copy(self) -> bool:
        """Whether no rank before this one holds the same parts."""
        return (self.mesh.coordinate("dp"), self.mesh.coordinate("cp")) == (0, 0)

    def counts(self, held: Held) -> bool:
        """Whether `held` counts on this rank; copies on other ranks do not count."""
        replica_of_tp = held.split is None and self._place > 0
        replica_of_dp = self.config.zero_stage == 0 and not self._is_first_copy
        return not (replica_of_tp or replica_of_dp or self._is_second_copy(held))

    @cached_property
    def _counting(self) -> list[Held]:
        return [held for held in self.held if self.counts(held)]

    def _is_second_copy(self, held: Held) -> bool:
        """Whether this is a tied head: the first pipeline stage has the same weight."""
        return self._is_tied and held.name == "head.weight"

    def _key(self, held: Held) -> str:
        return "token_embedding.weight" if self._is_second_copy(held) else held.name

    # Parts --------------------------------------------------------------------------------------

    def parameter_parts(self) -> list[tuple[str, Part]]:
        """(name, part) for all parameters in this rank's memory. A tied weight has one name."""
        # Without ZeRO-3 the rank holds whole parameters, even if other ranks update them.
        held = self._whole if self._zero3 is None else self.held
        return [(self._key(h), part) for h in held for part in h.parts(h.tensor, self._place)]

    def optimizer_parts(self) -> list[tuple[str, Part]]:
        """(name, part) for AdamW's states, `exp_avg.NAME` and `exp_avg_sq.NAME`.

        Makes states that do not exist yet.
        """
        return [
            (f"{state}.{self._key(held)}", part)
            for held in self.held
            for state in _STATES
            for part in held.parts(self._state(held.tensor)[state], self._place)
        ]

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        state = self._optimizer_of[tensor].state[tensor]
        if not state:  # make the same state as AdamW's first step
            wide = torch.get_default_dtype() == torch.float64
            state["step"] = torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32)
            state |= {name: torch.zeros_like(tensor.detach()) for name in _STATES}
        return state

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of updates, after AdamW's states have been loaded."""
        self.num_updates = num_updates
        for held in self.held:
            self._state(held.tensor)["step"].fill_(float(num_updates))

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state of the unsplit GPT, on the CPU of every rank. Collective; for small models."""
        needed = self._is_first_copy or self._zero3 is not None
        state = join_parts(self.parameter_parts() if needed else [])
        if self._is_tied:
            state["head.weight"] = state["token_embedding.weight"]
        return state
