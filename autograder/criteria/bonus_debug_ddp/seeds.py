"""Criteria for seeds: the same weights on all ranks, and random numbers of its own on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.answers import finite_floats, read_array, returned
from autograder.criteria.common.places import hashing_as
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

SHAPE = (3, 4)
NUM_DRAWN = 6
VIRTUAL_WORLDS = (2, 5)


def draw_seeds(draw: Draw) -> list[Values]:
    """Two seeds; one is 0, which no factor changes."""
    rng = draw.shared()
    seeds = [int(s) for s in rng.permutation([0, int(rng.integers(1, 10_000))])]
    return [{"seeds": seeds} for _ in range(draw.world_size)]


def _small() -> nn.Module:
    return nn.Linear(*SHAPE)


def _large() -> nn.Module:
    return nn.Linear(2 * SHAPE[0], SHAPE[1])


def observe_seeds(build_model: Any, inputs: Values, context: Context) -> Values:
    """For each virtual rank: the model's weights and the random numbers drawn after them.

    The second visit acts as a different process, the third builds a larger model.
    """
    answer: Values = {}
    with torch.random.fork_rng(devices=[]):
        for number, (seed, world_size) in enumerate(
            zip(inputs["seeds"], VIRTUAL_WORLDS, strict=True)
        ):
            for rank in range(context.rank, world_size, context.world_size):
                for visit, make in enumerate((_small, _small, _large)):
                    with hashing_as(visit, build_model):
                        model = returned(build_model(make, seed, rank), "build_model")
                    weight = getattr(model, "weight", model)
                    answer[f"w{number}/{rank}/{visit}"] = read_array(weight, "build_model's weight")
                    answer[f"r{number}/{rank}/{visit}"] = torch.rand(NUM_DRAWN).numpy()
                    torch.rand(rank + 1)  # earlier draws must not change the next model
    return answer


def _collect(
    case: Case, kind: str, shape: tuple[int, ...], visits: int
) -> list[list[np.ndarray]] | Finding:
    """Per seed the arrays of all virtual ranks: those of visit 0, then those of the next ones."""
    found = []
    for number, world_size in enumerate(VIRTUAL_WORLDS):
        arrays = []
        for visit in range(visits):
            for rank in range(world_size):
                real = rank % case.world_size
                got = finite_floats(case.answers[real].get(f"{kind}{number}/{rank}/{visit}"), shape)
                if got is None:
                    return Finding(f"rank={rank}: no model or no numbers came back.", real)
                arrays.append(got)
        found.append(arrays)
    return found


def judge_seed_weights(case: Case) -> list[Finding]:
    """All ranks have the same weights, and a different seed gives different weights."""
    found = _collect(case, "w", SHAPE[::-1], visits=2)
    if isinstance(found, Finding):
        return [found]
    for number, arrays in enumerate(found):
        if not all(np.allclose(a, arrays[0]) for a in arrays):
            return [
                Finding(
                    f"seed={case.inputs[0]['seeds'][number]}: the weights are not the same on all "
                    f"{VIRTUAL_WORLDS[number]} ranks, whenever they are built. Initial weights may "
                    "depend on the seed alone."
                )
            ]
    if np.allclose(found[0][0], found[1][0]):
        return [Finding("two seeds gave the same weights: they have to depend on `seed`.")]
    return []


def judge_seed_dropout(case: Case) -> Iterator[Finding]:
    """After the build, ranks draw different numbers; the same seed and rank repeat them.

    Code that seeds once, with rank and seed, before the weights, loses only `debug_seed_weights`.
    """
    found = _collect(case, "r", (NUM_DRAWN,), visits=3)
    if isinstance(found, Finding):
        yield found
        return
    for number, arrays in enumerate(found):
        seed, world_size = case.inputs[0]["seeds"][number], VIRTUAL_WORLDS[number]
        first, again, larger = (arrays[k * world_size :][:world_size] for k in range(3))
        for a in range(world_size):
            for b in range(a):
                # One equal number may be chance; two are not.
                if np.isin(first[a], first[b]).sum() > 1:
                    yield Finding(
                        f"seed={seed}: ranks {b} and {a} draw the same numbers after the model "
                        f"is built, perhaps at other places: {np.round(first[b], 4).tolist()} "
                        f"and {np.round(first[a], 4).tolist()}. "
                        + (
                            "So they drop the same units: W ranks with one mask."
                            if np.isclose(first[a], first[b]).sum() > 1
                            else "That is one stream, begun at different places: seed each "
                            "rank's generator differently."
                        )
                    )
                    return
        for a in range(world_size):
            if not np.allclose(first[a], again[a]):
                yield Finding(
                    f"seed={seed}, rank={a}: a second call, as in another process, gave other "
                    "random numbers. They must depend on seed and rank alone, or no run can "
                    "be repeated."
                )
                return
            if not np.allclose(first[a], larger[a]) and not judge_seed_weights(case):
                yield Finding(
                    f"seed={seed}, rank={a}: after a larger model was built, other random "
                    "numbers came. How many numbers a model takes for its weights must not "
                    "matter: seed anew once it is built."
                )
                return
    for rank in range(min(VIRTUAL_WORLDS)):
        if np.allclose(found[0][rank], found[1][rank]):
            yield Finding(
                f"rank={rank}: two seeds gave the same random numbers after the model was built: "
                "they have to depend on both `seed` and `rank`."
            )
            return
