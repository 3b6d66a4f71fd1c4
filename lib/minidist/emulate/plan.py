"""What each layer costs, and the secret factors that prove that a rank has paid for it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

DIRECTIONS = ("forward", "backward")
_STEPS = 1 << 16


@dataclass(frozen=True)
class ChargePlan:
    """Seconds of compute per layer, and the key of the factors that go with them.

    Args:
        forward_s: seconds of the forward pass of each layer.
        backward_s: seconds of the backward pass of each layer.
        secret: key of the factors. Whoever has it can compute gradients without being charged.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.forward_s) != len(self.backward_s):
            raise ValueError(
                "ChargePlan: forward_s and backward_s need one entry per layer each, got "
                f"{len(self.forward_s)} and {len(self.backward_s)}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    def seconds(self, layer: int, direction: str) -> float:
        return (self.forward_s if direction == "forward" else self.backward_s)[layer]

    def factor(self, rank: int, layer: int, direction: str, n: int) -> float:
        """Factor in [0.5, 1.5] of the n-th request (from 0) of a rank for a layer and direction.

        A multiple of 2**-16, so that float32 holds it exactly and an oracle in float64 uses the
        very same number.
        """
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
        message = f"{rank}|{n}|{layer}|{direction}".encode()
        digest = hmac.new(self.secret, message, hashlib.sha256).digest()
        return 0.5 + (int.from_bytes(digest[:8], "big") % (_STEPS + 1)) / _STEPS


class PlanChannel:
    """Answers charges from the plan itself: for an oracle that replays a rank in one process."""

    def __init__(self, plan: ChargePlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._counts: dict[tuple[int, str], int] = {}

    def charge(self, layer: int, direction: str) -> float:
        n = self._counts.get((layer, direction), 0)
        self._counts[layer, direction] = n + 1
        return self.plan.factor(self.rank, layer, direction, n)
