"""Random numbers on many ranks: equal where replicas must agree, different everywhere else.

    the same on every rank        initial weights (or broadcast them), the order of samples
    different on every rank       dropout, augmentation, noise
    different in every worker     augmentation in the processes of a loader: minidist.sampler

The usual mistake is to use one seed for both purposes. With `manual_seed(seed)` on all ranks, all
ranks drop the same neurons. With `manual_seed(seed + rank)` before the model is built, the ranks
start from different weights. So seed twice: before and after building the model.

Example::

    seed_all(seed)                  # the same: build the model
    model = GPT(config)
    seed_all(seed, rank)            # from here on, every rank draws its own

The parts of a seed are hashed, not added: with `seed + rank`, rank 1 of seed 0 would draw the same
numbers as rank 0 of seed 1.

>>> derive_seed(0, 1) == derive_seed(1, 0), derive_seed(0, 1) == derive_seed(0, 1)
(False, True)
>>> seed_all(7); first = torch.rand(2); state = get_rng_state()
>>> second = torch.rand(2); set_rng_state(state)
>>> torch.equal(torch.rand(2), second)
True
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed in 0 … 2**63 - 1 that depends on every part, such as rank, epoch, or a purpose.

    Unlike `hash`, the seed is the same on every machine and in every Python process.
    """
    plain: list[Any] = [operator.index(p) if _is_integer(p) else p for p in parts]  # pyright: ignore
    text = "\0".join([str(int(seed)), *(f"{type(p).__name__}:{p}" for p in plain)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _is_integer(part: Any) -> bool:
    """Whether a part is an integer of numpy or torch, which stands for the same number."""
    if isinstance(part, torch.Tensor):
        return part.numel() == 1 and not part.is_floating_point() and part.dtype != torch.bool
    return isinstance(part, np.integer)


def seed_all(seed: int, *parts: int | str) -> None:
    """Seed `random`, numpy's global generator, and torch on all devices.

    Args:
        parts: as for `derive_seed`; without parts, `seed` itself is used.
    """
    value = derive_seed(seed, *parts) if parts else seed
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


@contextmanager
def seeded(seed: int, *parts: int | str) -> Iterator[None]:
    """Seed all generators for the block only; afterwards they continue from their old state.

    Use this if a block needs the same numbers on all ranks and the code around it does not::

        with seeded(seed, "init"):
            model = GPT(config)
    """
    state = get_rng_state()
    seed_all(seed, *parts)
    try:
        yield
    finally:
        set_rng_state(state)


def get_rng_state() -> dict[str, Any]:
    """The state of all generators of this process, for a checkpoint.

    The state consists of tensors, numbers, strings and lists, so `torch.load(...,
    weights_only=True)` can read it. Every rank has a different state: save one state per rank.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    # This rank's device only: a query to any other device would create a CUDA context there.
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that `get_rng_state` returned.

    Raises:
        ValueError: the state was saved with a GPU and there is no GPU now, or vice versa.
    """
    has_gpu = torch.cuda.is_available()
    if len(state["cuda"]) != has_gpu:
        raise ValueError(
            f"set_rng_state: the state is of {len(state['cuda'])} CUDA devices, "
            f"this process has {int(has_gpu)}"
        )
    python, of_numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    np.random.set_state(
        (
            of_numpy["kind"],
            of_numpy["keys"].numpy().astype(np.uint32),
            of_numpy["position"],
            of_numpy["has_gauss"],
            of_numpy["cached"],
        )
    )
    torch.set_rng_state(state["torch"].cpu())
    if has_gpu:
        torch.cuda.set_rng_state(state["cuda"][0].cpu())
