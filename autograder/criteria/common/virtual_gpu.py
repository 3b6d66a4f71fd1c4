"""Pretended GPUs of this rank's node: torch finds them, and each has a random number generator.

Grading has fewer GPUs than ranks, or none. What code does with a GPU's random numbers, and what it
asks of the profiler, can be seen without one. No tensor can lie on such a GPU: code that needs one
there fails, and proves nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autograder.criteria.common.pretending import having, namespace, pretending

_STATE_BYTES = 16  # of a GPU's generator: its seed and how much it has drawn


class GpuGenerator:
    """A generator with a state like a GPU's, which a state of the CPU's generator does not fit."""

    def __init__(self, device: Any = "cuda") -> None:
        self.device = torch.device(device)
        self._seed, self._drawn = 0, 0

    def manual_seed(self, seed: int) -> GpuGenerator:
        """Begins anew."""
        self._seed, self._drawn = int(seed) % 2**64, 0
        return self

    def seed(self) -> int:
        """Begins anew with a seed that nobody knows."""
        return self.manual_seed(int.from_bytes(os.urandom(7))).initial_seed()

    def initial_seed(self) -> int:
        """The seed."""
        return self._seed

    def get_state(self) -> torch.Tensor:
        """The state: uint8[16]."""
        numbers = np.array([self._seed, self._drawn], np.uint64)
        return torch.from_numpy(numbers.view(np.uint8).copy())

    def set_state(self, state: torch.Tensor) -> None:
        """Goes on from a state; raises torch's error for one that is not a GPU's."""
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != _STATE_BYTES:
            raise RuntimeError("RNG state is wrong size")
        self._seed, self._drawn = map(int, state.cpu().numpy().copy().view(np.uint64))

    def draw(self, count: int) -> list[float]:
        """The next numbers."""
        self._drawn += count
        return np.random.default_rng([self._seed, self._drawn]).random(count).tolist()


class VirtualGpus:
    """The GPUs of a node, one for each of its ranks; this rank's is the one of LOCAL_RANK.

    Attributes:
        refused: why a real GPU would have refused a call for its generator; "" if none would have.
            Nothing is raised: a rank that left would let the others wait in their collectives.
    """

    def __init__(self) -> None:
        self.refused = ""
        self._mine = int(os.environ["LOCAL_RANK"])
        count = int(os.environ["LOCAL_WORLD_SIZE"])
        self._generators = [GpuGenerator(f"cuda:{index}") for index in range(count)]

    @property
    def generator(self) -> GpuGenerator:
        """The generator of this rank's GPU."""
        return self._generators[self._mine]

    @contextmanager
    def found_by(self, written: Any) -> Iterator[None]:
        """Inside, torch finds the GPUs, and the notebook's variables say so, too.

        Args:
            written: a function or class of the notebook, or a tuple of some.
        """
        names, mine = namespace(written), torch.device("cuda", self._mine)
        new: dict[str, Any] = {n: mine for n, v in names.items() if isinstance(v, torch.device)}
        # Such as HAS_GPU = torch.cuda.is_available().
        new |= {n: True for n, v in names.items() if v is False and re.search("(?i)cuda|gpu", n)}
        with pretending(written, self._instead()), having(names, new):
            yield

    def _instead(self) -> dict[tuple[Any, str], Any]:
        functions = {
            "get_rng_state": lambda device="cuda": self._of(device).get_state(),
            "set_rng_state": lambda new_state, device="cuda": self._set(new_state, device),
            "get_rng_state_all": lambda: [each.get_state() for each in self._generators],
            "set_rng_state_all": self._set_all,
            "manual_seed": lambda seed: self.generator.manual_seed(seed),
            "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in self._generators],
            "seed": lambda: self.generator.seed(),
            "seed_all": lambda: [each.seed() for each in self._generators],
            "initial_seed": lambda: self.generator.initial_seed(),
        }
        return {
            **{(torch.cuda, name): function for name, function in functions.items()},
            **{(torch.cuda.random, name): function for name, function in functions.items()},
            (torch.cuda, "default_generators"): tuple(self._generators),
            (torch.cuda, "is_available"): lambda: True,
            (torch.cuda, "device_count"): lambda: len(self._generators),
            (torch.cuda, "current_device"): lambda: self._mine,
            (torch.cuda, "synchronize"): lambda *_, **__: None,
            (torch.accelerator, "is_available"): lambda: True,
            (torch.accelerator, "current_accelerator"): lambda *_, **__: torch.device("cuda"),
            (torch, "Generator"): _make_generator,
        }

    def _of(self, device: Any) -> GpuGenerator:
        index = device if isinstance(device, int) else torch.device(device).index
        index = self._mine if index is None else index
        if not 0 <= index < len(self._generators):
            self.refused = f"cuda:{index} was asked for, and the node has {len(self._generators)}"
            return GpuGenerator()
        return self._generators[index]

    def _set(self, state: torch.Tensor, device: Any) -> None:
        generator = self._of(device)
        try:
            generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            self.refused = f"torch.cuda.set_rng_state refuses it: {error}"

    def _set_all(self, new_states: Any) -> None:
        for index, state in enumerate(new_states):
            self._set(state, index)


_Generator = torch.Generator


def _make_generator(device: Any = "cpu") -> Any:
    """Stands for torch.Generator."""
    of_gpu = torch.device(device).type == "cuda"
    return GpuGenerator(device) if of_gpu else _Generator(device)
