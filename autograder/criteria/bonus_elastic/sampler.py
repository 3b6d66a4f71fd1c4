"""Criteria for task 2 of bonus_elastic: an epoch that continues with a different number of ranks.

Each process plays all ranks, one after the other. The criteria pass their own `share` function
(`cut`, with uneven parts), so that a bug in task 1 does not count twice. Before every call the
criterion seeds the process's global random generators, so that only `elastic_order` fails if a
sampler uses them.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from autograder.criteria.common.answers import plain
from autograder.criteria.common.resumed import load_plain, own_random_numbers, saved
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer

Batches = list[list[list[int]]]  # per batch and rank: the indices, then the batch's size


def cut(size: int, world_size: int, rank: int) -> slice:
    """Uneven parts: the first ranks get smaller parts, or nothing."""
    begin, end = (int(size * (i / world_size) ** 1.5) for i in (rank, rank + 1))
    return slice(begin, end)


@contextlib.contextmanager
def _random_numbers(seed: int) -> Iterator[list[Any]]:
    """Seeds the process's random generators, yields `_states()`, and restores the generators.

    `seed` also changes what `hash` gives for a text, as a new process does.
    """

    def salted(value: Any) -> int:
        return plain_hash((seed, value) if isinstance(value, str | bytes) else value)

    plain_hash = hash
    with own_random_numbers(), mock.patch.object(builtins, "hash", salted):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        yield _states()


def _states() -> list[Any]:
    """The states of torch's, NumPy's and Python's generators, in a form that can be compared."""
    numpys: Any = np.random.get_state(legacy=False)
    inside = numpys["state"]
    return [
        torch.get_rng_state().tolist(),
        [*inside["key"].tolist(), inside["pos"]],
        random.getstate(),
    ]


def _make(sampler_class: Any, values: Values, seed: int | None = None) -> Any:
    seed = values["seed"] if seed is None else seed
    return sampler_class(values["num_samples"], values["batch"], seed=seed, share=cut)


def _fresh(sampler_class: Any, values: Values, state: Any = None) -> Any:
    """A new sampler, with `state` if given; the global generators are the same for each one."""
    with _random_numbers(0):
        sampler = _make(sampler_class, values)
        if state is not None:
            sampler.load_state_dict(state)
    return sampler


def _deal(sampler: Any, rank: int, world_size: int, values: Values) -> list[int]:
    """A rank's indices of the next batch, followed by the size of the batch."""
    dealt = sampler.next_batch(rank, world_size)
    if not isinstance(dealt, tuple | list) or len(dealt) != 2:
        raise TypeError(f"next_batch: expected (indices, size), got {type(dealt).__name__}")
    own = [integer(i, "an index from next_batch") for i in dealt[0]]
    if len(own) > values["num_samples"]:
        raise ValueError(
            f"next_batch: a sampler of {values['num_samples']} samples gave {len(own)} indices for "
            f"rank {rank}. Is anything kept from another sampler of this process?"
        )
    return [*own, integer(dealt[1], "the size from next_batch")]


def _deal_to_all(samplers: list[Any], values: Values, count: int) -> Batches:
    """`count` batches on all ranks, each rank with its own sampler."""
    return [
        [_deal(sampler, rank, len(samplers), values) for rank, sampler in enumerate(samplers)]
        for _ in range(count)
    ]


# --- reading the batches -------------------------------------------------------------------------


def _read(
    batches: Any, world_sizes: list[int], num_samples: int, *, any_parts: bool = False
) -> list[list[int]] | str:
    """The global batches in order, or a text that says what is wrong with their form or parts.

    With `any_parts` the sizes and the ranks' parts may be wrong; only the samples of a batch count.
    """
    if not isinstance(batches, list) or len(batches) != len(world_sizes):
        return "no batches came back."
    whole = []
    for number, (parts, world_size) in enumerate(zip(batches, world_sizes, strict=True)):
        right = isinstance(parts, list) and len(parts) == world_size
        if not right or not all(isinstance(p, list) and p for p in parts):
            return "no batches came back."
        if any(type(i) is not int for p in parts for i in p):
            return "indices are not all numbers."
        sizes = {part[-1] for part in parts}
        batch = [index for part in parts for index in part[:-1]]
        if any_parts:
            whole.append(sorted(set(batch)))
            continue
        if len(sizes) > 1:
            return f"batch {number}: ranks were told different sizes: {sorted(sizes)}."
        size = sizes.pop()
        if not 0 < size <= num_samples:
            return f"batch {number}: {size} cannot be the size of a batch."
        parts_right = [cut(size, world_size, rank) for rank in range(world_size)]
        wanted = [part.stop - part.start for part in parts_right]
        got = [len(part) - 1 for part in parts]
        if sum(got) != size:
            return (
                f"batch {number}: next_batch says that it has {size} samples, and the ranks took "
                f"{sum(got)} in all: `size` is the number of samples in this batch, of which the "
                "last one of an epoch may have fewer."
            )
        if got != wanted:
            return (
                f"batch {number} of {size} samples: with the share that the check brings, the "
                f"ranks take {wanted} of them, and took {got}: use `share`."
            )
        if not all(0 <= index < num_samples for index in batch):
            return f"batch {number}: an index is not between 0 and {num_samples - 1}."
        if len(set(batch)) != len(batch):
            return f"batch {number}: an index is there twice: the ranks' parts overlap."
        whole.append(batch)
    return whole


# --- elastic_epoch -------------------------------------------------------------------------------


def draw_epoch(draw: Draw) -> list[Values]:
    """Two numbers of samples, neither divisible by the batch size, and a number of ranks.

    The second is smaller than a batch.
    """
    rng = draw.shared()
    batch = int(rng.integers(5, 9))
    num_samples = batch * int(rng.integers(3, 6)) + int(rng.integers(1, batch))
    values = {
        "batch": batch,
        "asked": [num_samples, int(rng.integers(2, batch))],
        "ranks": int(rng.integers(2, 5)),
        "seed": int(rng.integers(1000)),
    }
    return [dict(values) for _ in range(draw.world_size)]


def _per_epoch(values: Values) -> int:
    return -(-values["num_samples"] // values["batch"])


def observe_epoch(sampler_class: Any, inputs: Values, context: Context) -> Values:
    """Two epochs of each number of samples, on a fixed number of ranks."""
    answer: Values = {}
    for num_samples in inputs["asked"]:
        values = inputs | {"num_samples": num_samples}
        samplers = [_fresh(sampler_class, values) for _ in range(inputs["ranks"])]
        batches: Batches = []
        for _ in range(2 * _per_epoch(values)):
            row = []
            for rank, sampler in enumerate(samplers):
                with _random_numbers(0):
                    row.append(_deal(sampler, rank, inputs["ranks"], values))
            batches.append(row)
        answer[f"batches/{num_samples}"] = batches
    return answer


def judge_epoch(case: Case) -> Iterator[Finding]:
    """Every sample comes once per epoch, in full batches; the rest is the epoch's last batch.

    A rank may have its part of a batch in any order.
    """
    for rank, answer in enumerate(map(plain, case.answers)):
        for num_samples in case.inputs[0]["asked"]:
            given = case.inputs[0] | {"num_samples": num_samples}
            if problem := _wrong_epochs(answer.get(f"batches/{num_samples}"), given):
                story = f"{num_samples} samples in batches of {given['batch']}"
                yield Finding(f"{story}: {problem}", rank)
                break


def _wrong_epochs(got: Any, given: Values) -> str:
    """What is wrong with two epochs of `given["num_samples"]` samples; "" if nothing is."""
    per_epoch = _per_epoch(given)
    batches = _read(got, [given["ranks"]] * 2 * per_epoch, given["num_samples"])
    if isinstance(batches, str):
        return batches
    full, rest = divmod(given["num_samples"], given["batch"])
    sizes = [len(batch) for batch in batches]
    if sizes != 2 * [*[given["batch"]] * full, rest]:
        return (
            f"expected {full} full ones and one of {rest} in each epoch, got {sizes}. Samples that "
            "do not fill a batch are the last batch of their epoch."
        )
    for epoch in range(2):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        if problem := _not_once(part, given["num_samples"]):
            return f"epoch {epoch}: {problem}"
    return ""


def _not_once(batches: list[list[int]], num_samples: int) -> str:
    seen = [index for batch in batches for index in batch]
    lost = sorted(set(range(num_samples)) - set(seen))
    doubled = len(seen) - len(set(seen))
    if not lost and not doubled:
        return ""
    return (
        f"expected each of {num_samples} samples once; {len(lost)} are missing "
        f"(such as {lost[:3]}) and {doubled} came again."
    )


# --- elastic_order -------------------------------------------------------------------------------


def draw_order(draw: Draw) -> list[Values]:
    """Two seeds of the sampler, one of them the default, and seeds of the global generators."""
    rng = draw.shared()
    batch = int(rng.integers(5, 9))
    values = {
        "batch": batch,
        "num_samples": 6 * batch,
        "seed": 0,
        "other": int(rng.integers(2000, 9000)),
        "noise": [int(n) for n in rng.integers(1, 2**31, 3)],
    }
    return [dict(values) for _ in range(draw.world_size)]


def observe_order(sampler_class: Any, inputs: Values, context: Context) -> Values:
    """Two epochs in each of three runs, and whether a run changed the global generators.

    The first two runs have the same seed, the third has a different seed. Every run starts with
    different states of the global generators.
    """
    answer: Values = {"epochs": [], "touched": False}
    for seed, noise in zip(
        [inputs["seed"], inputs["seed"], inputs["other"]], inputs["noise"], strict=True
    ):
        with _random_numbers(noise) as before:
            sampler = _make(sampler_class, inputs, seed)
            batches = _deal_to_all([sampler], inputs, 2 * _per_epoch(inputs))
            answer["touched"] |= before != _states()
        answer["epochs"].append(batches)
    return answer


def judge_order(case: Case) -> Iterator[Finding]:
    """The order depends on seed and epoch, and on nothing else. It may be shuffled in any way."""
    given = case.inputs[0]
    per_epoch = _per_epoch(given)
    first_rank: Any = None
    for rank, answer in enumerate(map(plain, case.answers)):
        runs = answer.get("epochs")
        runs = runs if isinstance(runs, list) and len(runs) == 3 else [None] * 3
        read = [_read(run, [1] * 2 * per_epoch, given["num_samples"]) for run in runs]
        orders = [[i for batch in run for i in batch] for run in read if not isinstance(run, str)]
        if len(orders) < 3:
            yield Finding(next(run for run in read if isinstance(run, str)), rank)
            continue
        one, again, other = orders
        half = len(one) // 2
        if one != again:
            yield Finding(
                "two samplers with the same seed dealt in a different order. Where does the order "
                "come from? The process's random numbers, and hash() of a text, differ from rank "
                "to rank and after a restart.",
                rank,
            )
        elif answer.get("touched") is not False:
            yield Finding(
                "the process's random numbers are not what they were before: dropout would change "
                "with every restart. Use a generator of your own.",
                rank,
            )
        elif one[:half] == sorted(one[:half]):
            yield Finding(
                "the samples come in the order in which they lie: nothing is shuffled.", rank
            )
        elif one[:half] == one[half:]:
            text = "with seed=0 the second epoch has the order of the first: the epoch has to enter"
            other_seed = ", also if the seed is 0 (with another one it does)"
            yield Finding(text + other_seed * (other[:half] != other[half:]) + ".", rank)
        elif one[:half] == other[:half] or one[half:] == other[half:]:
            yield Finding("a different seed gives the same order: the seed has to enter.", rank)
        elif first_rank is not None and first_rank != orders:
            yield Finding("this rank deals in a different order than rank 0.", rank)
        first_rank = first_rank or orders


# --- elastic_resize ------------------------------------------------------------------------------


def draw_resize(draw: Draw) -> list[Values]:
    """Numbers of ranks, and for how many batches each number stays."""
    rng = draw.shared()
    batch = int(rng.integers(5, 9))
    num_samples = 5 * batch + int(rng.integers(1, batch))  # the last batch is smaller
    values = {"batch": batch, "num_samples": num_samples, "seed": int(rng.integers(1000))}
    ranks = [int(r) for r in 1 + rng.permutation(5)[:4]]
    first, second = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    # The third change comes exactly at the end of an epoch.
    stays = [first, 6 - first + second, 6 - second, 2]
    values |= {"ranks": ranks, "stays": stays, "saver": int(rng.integers(5))}
    return [dict(values) for _ in range(draw.world_size)]


def observe_resize(sampler_class: Any, inputs: Values, context: Context) -> Values:
    """The batches of one rank, and of changing numbers of ranks that pass on the state by file."""
    whole = _fresh(sampler_class, inputs)
    calm: Batches = []
    for _ in range(sum(inputs["stays"])):
        with _random_numbers(0):
            calm += _deal_to_all([whole], inputs, 1)
    batches: Batches = []
    state: Any = None
    changed = False
    for world_size, stay in zip(inputs["ranks"], inputs["stays"], strict=True):
        given = repr(state)
        samplers = [_fresh(sampler_class, inputs, state) for _ in range(world_size)]
        for _ in range(stay):
            row = []
            for rank, sampler in enumerate(samplers):
                with _random_numbers(0):
                    row.append(_deal(sampler, rank, world_size, inputs))
            batches.append(row)
        changed = changed or given != repr(state)
        # All samplers get the same dict: a sampler that changes the dict disturbs the others.
        state = samplers[inputs["saver"] % world_size].state_dict()
        state = load_plain(saved(state), "state_dict")
    return {"calm": calm, "batches": batches, "changed": changed}


def judge_resize(case: Case) -> Iterator[Finding]:
    """The batches are those of a run without a change of the number of ranks.

    The state may have any keys.
    """
    given = case.inputs[0]
    stays, ranks = given["stays"], given["ranks"]
    world_sizes = [r for r, stay in zip(ranks, stays, strict=True) for _ in range(stay)]
    starts = list(itertools.accumulate(stays))[:-1]
    for rank, answer in enumerate(map(plain, case.answers)):
        # `elastic_epoch` judges which part of a batch a rank takes.
        calm, got = (
            _read(answer.get(name), sizes, given["num_samples"], any_parts=True)
            for name, sizes in (("calm", [1] * sum(stays)), ("batches", world_sizes))
        )
        if isinstance(calm, str) or isinstance(got, str):
            yield Finding(calm if isinstance(calm, str) else str(got), rank)
            continue
        story = f"({ranks} ranks, changed after batches {starts}; an epoch has 6 batches.)"
        pairs = enumerate(zip(calm, got, strict=True))
        other = [number for number, (one, two) in pairs if sorted(one) != sorted(two)]
        if not other:
            continue
        if answer.get("changed") is True:
            yield Finding(
                f"{story} next_batch changes the dict that load_state_dict was given: copy the "
                "numbers out of it. (Here the samplers of all ranks are loaded from one dict.)",
                rank,
            )
            continue
        if other[0] < starts[0]:
            yield Finding(
                f"{story} batch {other[0]}, before any change, has different samples on "
                f"{ranks[0]} ranks than on one: which samples a batch has must not depend on the "
                "number of ranks.",
                rank,
            )
            continue
        first = got[other[0]]
        same = [n for n, batch in enumerate(calm) if sorted(batch) == sorted(first)]
        if same:
            story += f" Batch {other[0]} has the samples of batch {same[0]}."
        for epoch in range(2):
            if problem := _not_once(got[6 * epoch : 6 * epoch + 6], given["num_samples"]):
                yield Finding(
                    f"{story} Epoch {epoch}: {problem} The state must count the samples that *all* "
                    "ranks have taken, and say the epoch, and load_state_dict goes on from there.",
                    rank,
                )
                break
        else:
            yield Finding(
                f"{story} batch {other[0]} has different samples than without a change: the order "
                "must not depend on the number of ranks.",
                rank,
            )
