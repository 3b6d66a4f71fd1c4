"""ZeRO stage 3: parameters are sharded, too. A unit is whole only while it computes.

    forward   gather 1 | compute 1, gather 2 | free 1, compute 2, gather 3 | ...
    backward  ... | gather 2 | compute 2, gather 1 | free 2, send gradients 2, compute 1 | ...

Phases of a step, all started by hooks on the modules:
1. before forward    the unit's parameters are all-gathered, and the next unit's gather starts
2. after forward     freed (except the root's, and the last unit's, which backward needs first)
3. before backward   gathered again; the gather of the previous unit in forward order starts
4. after backward    freed; gradients are reduce-scattered while the next unit computes
5. end of backward   each rank has added the mean of its elements to the `.grad` of its pieces

A backward that makes a graph (create_graph=True, for a gradient penalty) frees nothing. The next
backward frees nothing before its end, because the graph needs the parameters in a different order.

Example::

    model = GPT(config)
    zero = Zero3(model, units=model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # over the pieces
    model(x).sum().backward(); zero.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()
    torch.save(zero.full_state_dict(rank0_only=True), path)     # on all ranks; rank 0 has it

`model.parameters()` are always 1-D pieces of the original parameters: the same objects, with the
same names and in the same order. An optimiser must treat all elements alike (SGD, Adam and similar
optimisers; others are refused at their first step, and work in a WholeOptimizer). All ranks must
run the same units in the same order.

ZeRO (P_os+g+p): arXiv 1910.02054; units and prefetch as in PyTorch FSDP: arXiv 2304.11277.
Memory of mixed-precision Adam: 16/N bytes per parameter, plus the whole root and two whole units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.collectives.replicas import check_same_tensors, raise_on_all
from minidist.errors import named_rank
from minidist.outputs import tensors_in
from minidist.parallel.zero.checkpoint import StateDicts
from minidist.parallel.zero.elementwise import check_step_of_pieces
from minidist.parallel.zero.exchange import group_or_world
from minidist.parallel.zero.finite import raise_if_not_finite
from minidist.parallel.zero.flat import HOOKS, FlatShard, has_hooks
from minidist.parallel.zero.hooks import backward_is_running, call_after_backward, cast
from minidist.parallel.zero.materialise import materialise
from minidist.parallel.zero.unit import (
    State,
    Unit,
    assign_parameters,
    share_random_state,
    take_values_of_rank0,
)
from minidist.precision.clip import clip_by_global_norm, refuse_pieces
from minidist.unsupported import Unsupported

COPIES = Unsupported(
    "Zero3",
    "copies and pickles of a sharded model",
    instead="save full_state_dict() or save_sharded(), copy the model before Zero3(model), or use "
    "WeightAverage for a moving average",
)
NEW_PARAMETERS = Unsupported(
    "Zero3",
    "parameters that are added or converted after sharding",
    instead="add LoRA and call .to(dtype) before Zero3(model)",
)

# Reduce-scatters in progress while the next unit computes. Each holds whole gradients of a unit.
_MAX_IN_FLIGHT = 1

_is_checking: list[Any] = []  # the hook on every optimiser's first step, once registered


class Zero3(StateDicts):
    """Shards a model in place, and runs it.

    All parameters and buffers get the values of rank 0, so that all ranks start equal.

    Args:
        model: on the compute device or on the meta device. Parameters on the meta device are
            initialised one at a time, so no rank ever holds all of them.
        units: modules of `model` whose parameters are gathered together, e.g. its blocks; may be
            nested. All other parameters belong to the root, the model.
        group: ranks to shard over; None means all.
        whole: modules or parameters (norms, say) that every rank keeps whole, and computes with in
            their own dtype. They keep their shapes; their gradients are averaged.
        policy: any object with `param_dtype`, `reduce_dtype`, `output_dtype` and
            `cast_forward_inputs`, e.g. torch's MixedPrecisionPolicy. Shards, and so the optimiser,
            keep the dtype of the model.
        reshard_after_forward: free the parameters between forward and backward. False needs more
            memory, but saves one all-gather per unit (ZeRO-2's traffic).
        prefetch: number of units to gather ahead.
        offload: keep shards, gradients and optimiser state in CPU memory.
        device: where to compute; None means the model's device, or the CPU for a meta model.
        deterministic: add gradients in the order of the ranks on every backend, as one process adds
            those of as many micro-batches; the same bits, if their number is a power of two and
            gradients travel in the model's dtype. Needs the memory of all ranks' rows at once.
        init: called with the model if it is on the meta device; None means `reset_parameters`.

    Raises:
        ValueError: `units` or `whole` that are not of the model, parameters whose values nothing
            sets, a negative `prefetch`, or a model without parameters or with gradients; in a
            forward: parameters were added or converted after this call.
        MismatchError: on every rank, if ranks hold models of different form.
        TypeError: the model is copied or pickled.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[nn.Module] = (),
        group: dist.ProcessGroup | None = None,
        *,
        whole: Iterable[nn.Module | nn.Parameter] = (),
        policy: Any = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        offload: bool = False,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        init: Callable[[nn.Module], None] | None = None,
    ) -> None:
        # Validate.
        units = list(units)
        names = {module: name for name, module in model.named_modules()}
        self.group = group_or_world(group)
        kept = {p for each in whole for p in _parameters_of(each)}
        raise_on_all(_problem(model, units, kept, prefetch), self.group, "Zero3")
        refuse_pieces(model.parameters(), "Zero3")
        assigned = assign_parameters(model, units)
        homes_of = {p: names[module] for module, params in assigned.items() for p in params}
        homes_of |= dict.fromkeys(kept, "whole")
        named = [(f"{n} (unit {homes_of[p]!r})", p) for n, p in model.named_parameters()]
        check_same_tensors((*named, *model.named_buffers()), self.group)
        # Derive.
        self.model = model
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.policy = policy
        self.prefetch = prefetch
        self.device = _choose_device(model, device)
        is_meta = any(p.is_meta for p in model.parameters())
        if not is_meta:
            take_values_of_rank0(model, self.group, self.device)
        # Build. The first unit is the root's.
        self.units = [
            Unit(module, names[module], reshard_after_forward and module is not model)
            for module in assigned
        ]
        homes: dict[nn.Parameter, tuple[FlatShard, int]] = {}
        stay = {p: params.pop(p) for params in assigned.values() for p in list(params) if p in kept}
        for unit, params in zip(self.units, assigned.values(), strict=True):
            homes |= unit.shard(params, self.group, self.device, policy, offload)
        homes |= self.units[0].shard(stay, self.group, self.device, policy, offload, True)
        for flat in (flat for unit in self.units for flat in unit.flats):
            flat.gradients.ordered = deterministic
        if is_meta:
            self._materialise([*assigned.values(), stay], homes, init)
        super().__init__(model, [flat for unit in self.units for flat in unit.flats], self.group)
        self._sync = True
        self._trail: list[Unit] = []  # units in the order of this forward
        self._last_trail: list[Unit] = []  # units in the order of the previous forward
        self._in_backward = False
        self._makes_graph = False  # this backward has create_graph=True
        self._held_at: list[int] | None = None  # pieces' versions while a graph needs all units
        self._hears = False
        self._in_flight: list[FlatShard] = []
        self._register_hooks()
        # For training loops that have only the model: torch's function would use each rank's norm.
        object.__setattr__(model, "clip_grad_norm_", self.clip_grad_norm_)

    # -- construction --------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(
                partial(self._before_forward, unit), prepend=True, with_kwargs=True
            )
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        if not _is_checking:
            _is_checking.append(register_optimizer_step_pre_hook(check_step_of_pieces))

    def _materialise(self, assigned: Any, homes: Any, init: Any) -> None:
        # All ranks draw the same numbers, and each keeps its own elements.
        share_random_state(self.group, self.device)
        for params in assigned:
            for param, slots in params.items():
                for slot in slots:
                    slot.put(param)
        writers = {
            param: partial(flat.write, index)
            for param, (flat, index) in homes.items()
            if param.is_meta
        }
        try:
            materialise(self.model, writers, self.device, init)
        finally:
            for unit in self.units:
                unit.free()

    # -- forward -------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Activation checkpointing runs a forward again in the middle of backward.
        is_recompute = backward_is_running()
        if module is self.model and not is_recompute:
            self._begin_forward()
        # 1. before forward
        if unit.state is not State.BACKWARD:
            unit.wait()
            unit.state = State.FORWARD
            if not is_recompute:
                self._trail.append(unit)
                self._prefetch_forward()
                unit.num_calls += int(torch.is_grad_enabled())
        args, kwargs = self._cast_inputs((args, kwargs))
        if torch.is_grad_enabled():
            args, kwargs = call_after_backward((args, kwargs), partial(self._after_backward, unit))
        return args, kwargs

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
        # 2. after forward
        if unit.state is not State.BACKWARD and not self._stays(unit):
            unit.free()
        output_dtype = getattr(self.policy, "output_dtype", None)
        if module is self.model and output_dtype is not None:
            output = cast(output, output_dtype)
        return output

    def _stays(self, unit: Unit) -> bool:
        """Whether the parameters are kept until backward."""
        if not torch.is_grad_enabled():
            return False  # evaluation: no backward will come
        at = len(self._trail) - 1
        is_last = at == len(self._last_trail) - 1 and self._last_trail[at] is unit
        return is_last or not unit.reshard_after_forward

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise COPIES.error(
            f"it was to be copied or pickled on {named_rank()}, and its hooks belong to this "
            "model and its group",
            TypeError,
        )

    def _begin_forward(self) -> None:
        # Parameters that an earlier forward has left whole are out of date after a step of the
        # optimiser.
        if self._held_at is None or self._held_at != self._versions():
            self._held_at = None
            for unit in self.units:
                if unit.state is not State.SHARDED or not unit.is_sharded:
                    unit.free()
        for name, param in self.model.named_parameters():
            if param.requires_grad and param not in self._homes:
                raise NEW_PARAMETERS.error(
                    f"{name} was not there when the model was sharded, so nothing averages its "
                    f"gradient on {named_rank()}"
                )
        if self._in_backward:  # the last backward ended with an exception
            self._in_backward = self._makes_graph = False
            self._in_flight.clear()
            self.discard_gradients()
        self._last_trail, self._trail = self._trail, []

    def _prefetch_forward(self) -> None:
        # Prefetch in the order of the last forward, as long as this forward has the same order.
        at = len(self._trail)
        if self._last_trail[:at] == self._trail:
            for unit in self._last_trail[at : at + self.prefetch]:
                unit.gather()

    def _cast_inputs(self, inputs: Any) -> Any:
        dtype = getattr(self.policy, "param_dtype", None)
        if dtype is None or not getattr(self.policy, "cast_forward_inputs", True):
            return inputs
        return cast(inputs, dtype)

    # -- backward ------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        self._begin_backward()
        if torch.is_grad_enabled() and not self._makes_graph:
            self._hold()
        # 3. before backward
        if unit.state is not State.BACKWARD:
            unit.wait()
            unit.state = State.BACKWARD
            if unit in self._trail:
                at = self._trail.index(unit)
                for previous in reversed(self._trail[max(0, at - self.prefetch) : at]):
                    previous.gather()

    def _begin_backward(self, _param: Tensor | None = None) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _hold(self) -> None:
        """Keep all units until the end of the backward after this one."""
        self._makes_graph, self._held_at = True, self._versions()
        if not self._hears:  # the graph of a penalty need not pass through a unit's output
            self._hears = True
            for param in (p for flat in self.flats for p in flat.params if p.requires_grad):
                param.register_post_accumulate_grad_hook(self._begin_backward)

    def _versions(self) -> list[int]:
        return [piece._version for flat in self.flats for piece in flat.pieces]

    def _after_backward(self, unit: Unit) -> None:
        unit.num_calls -= 1
        if self._held_at is not None:
            return
        if unit.num_calls <= 0 and unit.state is State.BACKWARD:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        # 4. after backward
        for flat in unit.flats:
            flat.collect()
        if not self._makes_graph:
            unit.free()
        unit.owes_gradients = not self._sync
        if self._sync:
            for flat in unit.flats:
                if flat.is_trainable:
                    if flat in self._in_flight:  # the unit ran in two reentrant checkpoints
                        self._in_flight.remove(flat)
                        flat.keep()
                    flat.gradients.launch()
                    self._in_flight.append(flat)
            while len(self._in_flight) > _MAX_IN_FLIGHT:
                self._in_flight.pop(0).keep()

    def _end_backward(self) -> None:
        # 5. end of backward. The root and units whose inputs need no gradient are still left.
        for unit in dict.fromkeys([*reversed(self._trail), *reversed(self.units)]):
            is_due = self._sync and unit.owes_gradients  # the unit ran only in no_sync()
            if unit.state is State.BACKWARD or unit.has_gradients or is_due:
                self._reduce(unit)
            elif not unit.is_sharded and not self._makes_graph:
                unit.free()
            unit.num_calls = 0
        while self._in_flight:
            self._in_flight.pop(0).keep()
        if not self._makes_graph:
            self._held_at = None
        self._in_backward = self._makes_graph = False

    # -- for the training loop -----------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients whole and local in the block; the next backward outside sends the sum.

        This saves reduce-scatters in accumulation, but meanwhile costs the memory of whole
        gradients. Without it, each backward adds to the sharded gradients.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`.

        Collective. Returns the norm before scaling, the same on all ranks. If gradients are nan or
        inf, so is the norm, and a loss scaler then skips the step.

        Raises:
            RuntimeError: the last backward was inside `no_sync`.
            MinidistError: on every rank; parameters are nan or inf. The message names them.
        """
        if any(not flat.gradients.is_empty for flat in self.flats):
            raise RuntimeError(
                f"[rank {self.rank}] the last backward() was inside no_sync(), so its gradients "
                "were never averaged"
            )
        pieces = [piece for flat in self.flats for piece in flat.pieces]
        norm = clip_by_global_norm(pieces, max_norm, norm_type, self.group)
        if not torch.isfinite(norm):  # the same on all ranks
            self.check_finite()
        return norm

    def check_finite(self) -> None:
        """Collective: are all parameters finite?

        Raises:
            MinidistError: on every rank; the message names the parameters that are nan or inf, the
                ranks that hold those elements, and the gradients that are.
        """
        raise_if_not_finite(self.model, self.group)

    def discard_gradients(self) -> None:
        """Drop all gradients: those of the pieces, like zero_grad, and those kept by no_sync."""
        for unit in self.units:
            unit.owes_gradients = False
            for flat in unit.flats:
                flat.gradients.clear()
                for param in (*flat.pieces, *flat.params):
                    param.grad = None

    @contextlib.contextmanager
    def unsharded(self, *, writeback: bool = False) -> Iterator[None]:
        """Whole parameters in the block, in the compute dtype, to read or (writeback) change.

        Collective: every rank must enter the block and make the same changes.
        """
        for unit in self.units:
            unit.wait()
        for flat in self.flats:
            flat.expose()
        try:
            yield
            if writeback:
                for flat in self.flats:
                    flat.write_back()
        finally:
            for unit in self.units:
                unit.free()


def _parameters_of(each: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return list(each.parameters()) if isinstance(each, nn.Module) else [each]


def _problem(
    model: nn.Module, units: list[nn.Module], kept: set[nn.Parameter], prefetch: int
) -> str | None:
    """What is wrong with the arguments on this rank."""
    modules = set(model.modules())
    strangers = [type(unit).__name__ for unit in units if unit not in modules]
    if strangers:
        return f"units that are not modules of the model: {strangers}"
    if prefetch < 0:
        return f"prefetch must not be negative, got {prefetch}"
    if not any(True for _ in model.parameters()):
        return "the model has no parameters"
    if foreign := len(kept - set(model.parameters())):
        return f"{foreign} parameters of `whole` are not of the model"
    named = list(model.named_parameters())
    if having := [n for n, p in named if p.grad is not None]:
        return f"{having[:2]} have whole gradients; call model.zero_grad() before sharding"
    if hooked := [n for n, p in named if has_hooks(p)]:
        error = HOOKS.error(f"{hooked[:2]} have hooks, which no gradient would reach")
        return str(error).removeprefix("Zero3: ")
    return None


def _choose_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = next(model.parameters()).device
    return torch.device("cpu") if found.type == "meta" else found
