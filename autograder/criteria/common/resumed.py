"""What criteria about resuming share: random states, and a state that goes through a file."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Restores the random states on exit, so that the notebook's random numbers are unaffected."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def saved(state: Any) -> bytes:
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def load_plain(data: bytes, what: str) -> Any:
    """The state that was `saved`.

    Raises:
        TypeError: the state, which the message calls `what`, holds more than plain values.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # Torch's own text is long, and its first advice is to do without weights_only.
        refused = re.search(r"GLOBAL (\S{1,80})", str(error))
        raise TypeError(
            f"{what} must hold only tensors, numbers, text, None, lists, tuples and dicts, so "
            "that torch.load(…, weights_only=True) reads it: "
            + (f"it refuses {refused[1]}." if refused else str(error)[:300])
        ) from None
