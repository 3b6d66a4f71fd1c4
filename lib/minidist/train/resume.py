"""The content of a run's checkpoint, and how a run continues from a checkpoint.

    shared    step, epoch, samples of the epoch, updates, loss scale   the same on every rank
    local     random numbers                                           each rank its own
    sharded   parameters, AdamW's two moments, biases of routers       parts of whole tensors

The learning rate is a function of the step, so the checkpoint does not contain it. With the same
layout of ranks a resumed run equals an uninterrupted run bit for bit. With a different layout, each
rank reads its parts from the files of the ranks that wrote them; only the random numbers (dropout)
start again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from minidist.checkpoint import Checkpoints, Shard
from minidist.errors import named_rank
from minidist.parallel.hybrid import HybridTrainer, Part
from minidist.seeding import get_rng_state, set_rng_state


@dataclass
class Progress:
    """How far a run has come; the same on every rank."""

    step: int = 0  # steps done
    epoch: int = 0
    num_consumed: int = 0  # samples of this epoch that all ranks together have trained on

    def advance(self, num_samples: int) -> None:
        self.step += 1
        self.num_consumed += num_samples

    def next_epoch(self) -> None:
        self.epoch += 1
        self.num_consumed = 0


@dataclass
class _Value:
    """An object with the two methods that `Checkpoints` calls."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], Any]


class RunState:
    """Saves and loads a run. Every rank creates a RunState, and all ranks call the same methods.

    Args:
        checkpoints: None saves nothing, and every method does nothing.
        facts: name -> value of the settings that must be equal in the saved and the resumed run.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        trainer: HybridTrainer,
        scaler: Any,
        progress: Progress,
        facts: dict[str, Any],
    ) -> None:
        self.checkpoints, self.trainer, self.progress = checkpoints, trainer, progress
        self._facts = facts
        self._layout = str(trainer.config)
        self._saved_at = -1
        self._same_layout = True
        self._shared = {
            "facts": _Value(lambda: dict(facts), self._compare),
            "progress": _Value(lambda: asdict(progress), vars(progress).update),
            "updates": _Value(lambda: {"num": trainer.num_updates}, self._keep_num_updates),
            "scaler": _Value(scaler.state_dict, scaler.load_state_dict),
        }
        self._local = {"random": _Value(self._random, self._set_random)}
        self._num_updates = 0

    def save(self) -> None:
        if self.checkpoints is not None and self._saved_at != self.progress.step:
            self.checkpoints.save(
                self.progress.step, shared=self._shared, local=self._local, sharded=self._shards()
            )
            self._saved_at = self.progress.step

    def load(self) -> bool | None:
        """Load the newest complete checkpoint.

        Returns:
            True if the random numbers were restored, False if the layout differs; None if there is
            no checkpoint.

        Raises:
            CheckpointError: on every rank, if the checkpoint was made with different `facts`, such
                as the model or the batch size.
        """
        if self.checkpoints is None:
            return None
        self._same_layout = False  # until this rank's random numbers are found
        step = self.checkpoints.load(
            shared=self._shared, local=self._local, sharded=self._shards(), any_world_size=True
        )
        if step is None:
            return None
        self.trainer.set_num_updates(self._num_updates)
        self._saved_at = step
        return self._same_layout

    def _shards(self) -> dict[str, list[Shard]]:
        found: dict[str, list[Shard]] = {}
        for name, part in [*self.trainer.parameter_parts(), *self.trainer.optimizer_parts()]:
            found.setdefault(name, []).append(_shard(part))
        return found

    def _compare(self, saved: dict[str, Any]) -> None:
        # The names of both: a dense model has no facts about experts.
        different = [
            f"{name} {saved.get(name)!r}, now {self._facts.get(name)!r}"
            for name in {**saved, **self._facts}
            if saved.get(name) != self._facts.get(name)
        ]
        if different:
            raise ValueError(
                f"the checkpoint was made with {', '.join(different)} ({named_rank()})"
            )

    def _keep_num_updates(self, state: dict[str, int]) -> None:
        self._num_updates = state["num"]  # `load` passes it to AdamW after loading the moments

    def _random(self) -> dict[str, Any]:
        return {"layout": self._layout, "default": get_rng_state()}

    def _set_random(self, state: dict[str, Any]) -> None:
        if state["layout"] != self._layout:
            return
        set_rng_state(state["default"])
        self._same_layout = True


def _shard(part: Part) -> Shard:
    return Shard(tensor=part.tensor, global_shape=part.global_shape, offsets=part.offsets)
