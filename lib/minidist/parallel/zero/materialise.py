"""Initialise a model that has no memory, one parameter at a time.

A model made under `torch.device("meta")` has shapes but no values. Its own `reset_parameters` then
sets the values, and this module watches these calls. Meanwhile parameters are hollow: tensors of
the right shape whose storage has been freed. When the initialisation touches a parameter, its
storage is allocated. When the initialisation goes on to the next parameter, the values of the
previous one are handed over (to be sharded) and its storage is freed. The order of random numbers
is the same as without sharding, so with the same seed the values are the same.

>>> with torch.device("meta"):
...     layer = torch.nn.Linear(3, 2)
>>> values = []
>>> writers = {param: lambda value: values.append(value.clone()) for param in layer.parameters()}
>>> _ = torch.manual_seed(0)
>>> materialise(layer, writers, torch.device("cpu"))
>>> _ = torch.manual_seed(0)
>>> torch.equal(values[0], torch.nn.Linear(3, 2).weight)
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These operations overwrite all values of a tensor.
_OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_"}


def materialise(
    model: nn.Module,
    writers: Mapping[nn.Parameter, Callable[[Tensor], None]],
    device: torch.device,
    init: Callable[[nn.Module], None] | None = None,
) -> None:
    """Run a meta model's initialisation; every parameter's values go to its writer.

    Afterwards the model has its meta parameters again. Buffers get memory on `device` and keep it.

    Args:
        writers: for every parameter on the meta device, a function that takes its values.
        init: initialises the model in place. None means `model.reset_parameters()`, then
            `reset_parameters()` of each submodule that still has unset values.

    Raises:
        ValueError: nothing has set the values of some parameters or buffers; or the initialisation
            returns to a parameter whose values have already been handed over.
    """
    # Replace the meta parameters by hollow parameters.
    hollow = {param: _hollow(param, device) for param in writers}
    places = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and param in hollow
    ]
    for module, name, param in places:
        module._parameters[name] = hollow[param]
    versions = _allocate_buffers(model, device)
    names = {param: name for name, param in model.named_parameters()}
    watch = _Watch({hollow[param]: write for param, write in writers.items()}, names)

    def unset(module: nn.Module) -> list[str]:
        params = [name for name, p in module.named_parameters() if watch.is_unset(p)]
        buffers = [name for name, b in module.named_buffers() if versions.get(id(b)) == b._version]
        return params + buffers

    # Run the initialisation.
    try:
        with torch.no_grad(), watch:
            if init is not None:
                init(model)
            else:
                for module in model.modules():
                    if hasattr(module, "reset_parameters") and unset(module):
                        module.reset_parameters()  # pyright: ignore[reportCallIssue]
        watch.hand_over()
        if unset(model):
            raise ValueError(
                f"meta device: nothing sets the values of {unset(model)}; give their modules a "
                "reset_parameters(), or pass init="
            )
    finally:
        for module, name, param in places:
            module._parameters[name] = param


def _hollow(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, param.requires_grad)


def _allocate_buffers(model: nn.Module, device: torch.device) -> dict[int, int]:
    """Give meta buffers memory. Returns id -> version of each, to detect later writes."""
    versions = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                real = torch.empty_like(buffer, device=device)
                module._buffers[name] = real
                versions[id(real)] = real._version
    return versions


class _Watch(TorchDispatchMode):
    """Gives a hollow parameter memory when an operation touches it; one parameter at a time."""

    def __init__(
        self,
        writers: Mapping[nn.Parameter, Callable[[Tensor], None]],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        super().__init__()
        self._writers = writers
        self._names = names
        # The key is the storage, so that views and `.data` are recognised, too.
        self._params = {_key(param): param for param in writers}
        self._current: nn.Parameter | None = None
        self._set: set[nn.Parameter] = set()

    def is_unset(self, param: Tensor) -> bool:
        return param in self._writers and param not in self._set

    def hand_over(self) -> None:
        """Give the current parameter's values to its writer and free its memory."""
        param, self._current = self._current, None
        if param is not None:
            if param in self._set:
                self._writers[param](param.detach())
            param.untyped_storage().resize_(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view, such as `detach`, touches no memory.
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and _key(tensor) in self._params:
                    self._touch(self._params[_key(tensor)], tensor, func)
        return func(*args, **kwargs)

    def _touch(self, param: nn.Parameter, tensor: Tensor, func: Any) -> None:
        if param is not self._current:
            is_fresh = tensor.numel() == param.numel() and (
                func.overloadpacket.__name__ in _OVERWRITES
            )
            if param in self._set and not is_fresh:
                raise ValueError(
                    f"meta device: the initialisation comes back to {self._names[param]} with "
                    f"{func}, after its values have been sharded; finish one parameter at a time"
                )
            self.hand_over()
            self._current = param
            num_bytes = param.numel() * param.element_size()
            param.untyped_storage().resize_(num_bytes)
        if func._schema.is_mutable:
            self._set.add(param)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
