"""A moving average of weights (EMA), whole or sharded, to evaluate instead of the last weights.

    average <- decay * average + (1 - decay) * weights        after every step of the optimiser

Each element is averaged by itself, so a rank averages what it holds, without communication: its
pieces of a `Zero3` model, or whole replicas. `torch.optim.swa_utils` copies the model, which a
sharded model refuses.

Example, with a Zero3 model::

    average = WeightAverage(model.parameters(), decay=0.999)
    for batch in loader:
        ...; optimizer.step(); average.update()
    with average.applied():                    # on all ranks
        evaluate(model); weights = zero.full_state_dict()

>>> weight = torch.nn.Parameter(torch.tensor([0.0]))
>>> average = WeightAverage([weight], decay=0.75)
>>> _ = weight.data.fill_(4.0)
>>> average.update()
>>> with average.applied():
...     print(weight.item())
1.0
>>> weight.item()
4.0

Source: Polyak and Juditsky 1992; as in Mean teachers (arXiv 1703.01780).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from minidist.errors import named_rank
from minidist.precision.clip import parameters_of_masters, shard_group


class WeightAverage:
    """The average of some tensors, which starts at their values.

    Args:
        parameters: what the optimiser updates: a model's parameters, whole or pieces, or masters
            of `MasterWeights`, whose parameters have the rounded average in `applied`.
        decay: share of the old average, from 0 to 1 (exclusive).
        dtype: of the average. In bfloat16, small changes would be rounded away.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        decay: float = 0.999,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"WeightAverage: decay must be in 0 ... 1 (exclusive), got {decay}")
        self.decay = decay
        self._parameters = list(parameters)
        self._averages = [
            p.detach().to(torch.promote_types(p.dtype, dtype), copy=True) for p in self._parameters
        ]
        self._num_applied = 0  # blocks that are open, one in the other

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights; call it after every step.

        Raises:
            RuntimeError: in `applied`, where the weights are the average.
            ValueError: the size of a parameter has changed since this object was made (sharding).
        """
        if self._num_applied:
            raise RuntimeError(f"WeightAverage: update() inside applied() on {named_rank()}")
        self._check()
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(parameter.to(average), 1 - self.decay)

    @contextlib.contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """The weights are the average in the block; afterwards they are what they were."""
        self._check()
        rounded = parameters_of_masters(self._parameters)
        changed = [*self._parameters, *rounded]
        kept = [parameter.detach().clone() for parameter in changed]
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            parameter.copy_(average)
        for parameter, master in rounded.items():
            parameter.copy_(master)
        self._num_applied += 1
        try:
            with torch.enable_grad():
                yield
        finally:
            self._num_applied -= 1
            for parameter, value in zip(changed, kept, strict=True):
                parameter.copy_(value)

    @property
    def differs_by_rank(self) -> bool:
        """Whether `state_dict` differs between ranks (`Checkpoints` asks)."""
        return shard_group(self._parameters) is not None

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint. Of a sharded model each rank saves its own, like its pieces."""
        return {"decay": self.decay, "averages": list(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved average, of as many ranks and with as many parameters."""
        loaded = [tuple(each.shape) for each in state["averages"]]
        expected = [tuple(each.shape) for each in self._averages]
        if loaded != expected:
            raise ValueError(
                f"WeightAverage: expected {len(expected)} tensors with the shapes of these "
                f"parameters on {named_rank()}, got {len(loaded)} of different shapes; load it "
                "on as many ranks as saved it"
            )
        self.decay = state["decay"]
        for average, value in zip(self._averages, state["averages"], strict=True):
            average.copy_(value)

    def _check(self) -> None:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            if average.shape != parameter.shape:
                raise ValueError(
                    f"WeightAverage: a parameter had shape {tuple(average.shape)} and has "
                    f"{tuple(parameter.shape)} on {named_rank()}; make it after Zero3(model)"
                )
