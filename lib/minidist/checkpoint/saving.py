"""What can be saved, a save in the background, and the error of checkpoints."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from minidist.errors import MinidistError, named_rank
from minidist.precision.clip import shard_group


class CheckpointError(MinidistError):
    """A checkpoint could not be written or read; the message names the file and the rank."""


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a scaler, a sampler, ..."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


States = Mapping[str, Stateful]


class Saving:
    """A save under way in the background."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], Path]) -> None:
        try:
            self._path = work()
        except BaseException as error:
            self._error = error
            # Nobody may ever ask: the program may end here.
            warnings.warn(
                f"a checkpoint was not saved in the background: {error}; wait(), or the next save, "
                f"raises this error ({named_rank()})",
                stacklevel=1,
            )

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float = 600.0) -> Path:
        """The checkpoint's folder, once it is complete; raises what went wrong."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(f"saving had not ended after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


def refuse_parts(name: str, part: Any) -> None:
    """Raise ValueError if ranks hold different parts of an object's state: one would be saved."""
    own = getattr(part, "differs_by_rank", None)
    if own is None:
        tensors = [p for group in getattr(part, "param_groups", ()) for p in group["params"]]
        tensors += part.parameters() if isinstance(part, nn.Module) else []
        own = shard_group(tensors) is not None
    if own:
        raise ValueError(
            f"shared[{name!r}], {type(part).__name__}, holds a different part on each rank, and "
            f"only the part of rank 0 would be written ({named_rank()}); save it as `local`, or "
            "its full_state_dict"
        )
