"""Criteria for a sampler that deals a dataset out to ranks. Nothing here communicates.

A sampler takes `rank` and `world_size` as arguments, so every real rank evaluates several
*virtual* ranks. A sampler that works at only one world size is found at any real world size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import torch

from autograder.criteria.common.answers import described, naming, returned, told
from autograder.criteria.common.places import hashing_as
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer

VIRTUAL_WORLDS = (1, 2, 3, 4, 7)
DEFAULTS = {"shuffle": True, "seed": 0, "tail": "pad"}
EPOCHS = 12  # a right sampler hardly ever drops the same sample in so many epochs


def observe(sampler_class: Any, inputs: Values, context: Context) -> Values:
    """Indices and lengths of the virtual ranks of this rank, for every setting that was drawn."""
    with hashing_as(context.rank, sampler_class):
        return _observe(sampler_class, inputs, context)


def _observe(sampler_class: Any, inputs: Values, context: Context) -> Values:
    answer: Values = {"moved": []}  # settings in which the global generator was moved
    for number, setting in enumerate(inputs["settings"]):
        world_size = setting["world_size"]
        for rank in range(context.rank, world_size, context.world_size):
            torch.rand(1)  # so that the generator does not stand at its beginning
            before = torch.get_rng_state()
            options = {name: setting[name] for name in ("shuffle", "seed", "tail")}
            if options == DEFAULTS:
                options = {}
            sampler = sampler_class(setting["num_samples"], rank, world_size, **options)
            for visit, epoch in enumerate(setting["epochs"]):
                if epoch is not None:
                    sampler.set_epoch(epoch)
                indices: list[int] = []
                for index in _iterator(sampler):
                    indices.append(_whole(index, answer))
                    if len(indices) == 1 and not torch.equal(before, torch.get_rng_state()):
                        answer["moved"].append(number)  # even if it is restored at the end
                answer[f"{number}/{rank}/{visit}"] = np.array(indices, dtype=np.int64)
                if not torch.equal(before, torch.get_rng_state()):
                    answer["moved"].append(number)
            with naming("len(sampler)"):
                answer[f"{number}/{rank}/len"] = integer(len(sampler), "len(sampler)")
    return answer


def _iterator(sampler: Any) -> Any:
    """The iterator of the sampler; a TypeError for students if `__iter__` returns none."""
    found = sampler.__iter__() if hasattr(sampler, "__iter__") else iter(sampler)
    if not hasattr(returned(found, "__iter__"), "__next__"):
        raise TypeError(f"__iter__ returned {described(found)}: expected an iterator, as of iter()")
    return found


def _whole(index: Any, answer: Values) -> int:
    """The index as an int. Where a different type stands for one (a tensor of shape (), say), the
    answer notes it, and only `judge_partition` minds."""
    if not isinstance(index, bool | int | np.integer) and hasattr(index, "__index__"):
        answer["no int"] = type(index).__name__
        index = operator.index(index)
    return integer(index, "an index from ShardSampler")


def _draw(draw: Draw, settings: list[Values]) -> list[Values]:
    rng = draw.shared("seeds")
    for setting in settings:
        setting.setdefault("seed", int(rng.integers(1000)))
        setting.setdefault("epochs", [int(rng.integers(1, 20))])
        setting.setdefault("tail", "pad")
    return [{"settings": settings} for _ in range(draw.world_size)]


def draw_partition(draw: Draw) -> list[Values]:
    """Sizes that divide evenly, with and without shuffling; some before the first set_epoch."""
    rng = draw.shared()
    settings: list[Values] = [
        {"num_samples": world_size * int(rng.integers(16, 30)), "world_size": world_size, **more}
        for world_size, more in product(
            VIRTUAL_WORLDS,
            ({"shuffle": False}, {"shuffle": True}, {"shuffle": True, "epochs": [None], "seed": 0}),
        )
    ]
    return _draw(draw, settings)


def draw_tail(draw: Draw) -> list[Values]:
    """Sizes just above, just below and at a multiple of the ranks, and fewer samples than ranks.

    Each shuffled setting has a twin with the same ranks, seed and epochs, whose size divides: it
    shows whether the ranks draw the same permutation, which `judge_partition` judges. Settings
    without shuffling are iterated twice.
    """
    rng = draw.shared()
    settings: list[Values] = []
    twins: list[Values] = []
    for world_size, tail in product(VIRTUAL_WORLDS[1:], ("pad", "drop", "uneven")):
        full = world_size * int(rng.integers(6, 12))
        common = {"world_size": world_size, "tail": tail, "seed": int(rng.integers(1000))}
        even = common | {"num_samples": full, "shuffle": True}
        sizes = {full - 1, full + 1, 1, world_size - 1}
        if tail != "pad":
            sizes |= {full, world_size}  # with "pad" these are `draw_partition`'s
        for size in sorted(sizes - {0}):
            epochs = [int(rng.integers(1, 20))]
            if size in (full - 1, full + 1):
                epochs = list(range(epochs[0], epochs[0] + EPOCHS))
            one = common | {"num_samples": size, "epochs": epochs}
            settings.append(one | {"shuffle": False, "epochs": [epochs[0], None]})
            settings.append(one | {"shuffle": True, "twin": len(twins)})
            twins.append(even | {"epochs": epochs})
    for setting in settings:
        if "twin" in setting:
            setting["twin"] += len(settings)
    return _draw(draw, settings + twins)


def draw_epoch(draw: Draw) -> list[Values]:
    """One size and several epochs under three seeds.

    The first epoch comes twice, and then a third time without a new set_epoch. The last settings
    read the sampler before its first set_epoch, in epoch 0, in epoch 1, and in epoch 0 again. Seeds
    and epochs are below 48: an order that is only turned differs for each of them.
    """
    rng = draw.shared()
    first, second, third = (int(e) for e in 1 + rng.choice(40, 3, replace=False))
    common = {"shuffle": True, "num_samples": 48}
    return _draw(
        draw,
        [
            common
            | {
                "world_size": world_size,
                "seed": seed,
                "epochs": [first, second, third, first, None],
            }
            for world_size, seed in product((2, 3), (0, 3, int(rng.integers(10, 48))))
        ]
        + [common | {"world_size": 2, "epochs": [None, 0, 1, 0], "seed": seed} for seed in (0, 1)],
    )


def _collect(
    case: Case, number: int, setting: Values, visit: int = 0, judges_length: bool = True
) -> list[np.ndarray] | Finding:
    """The index list of every virtual rank, or a finding if a list is missing or wrong.

    Args:
        judges_length: whether `len(sampler)` has to be right, too.
    """
    lists = []
    for virtual in range(setting["world_size"]):
        real = virtual % case.world_size
        got = case.answers[real].get(f"{number}/{virtual}/{visit}")
        length = case.answers[real].get(f"{number}/{virtual}/len")
        where = _where(setting, virtual) + _when(setting, visit)
        if not isinstance(got, np.ndarray) or got.ndim != 1 or got.dtype.kind != "i":
            return Finding(f"{where}: no list of indices came back.", real)
        if judges_length and length != len(got):
            return Finding(f"{where}: len(sampler) is {length}, but it yields {len(got)}.", real)
        if ((got < 0) | (got >= setting["num_samples"])).any():
            return Finding(
                f"{where}: yields an index outside 0…{setting['num_samples'] - 1}.", real
            )
        lists.append(got)
    return lists


def _when(setting: Values, visit: int) -> str:
    return ", iterated a second time" if setting["epochs"][visit] is None else ""


def _where(setting: Values, virtual: int | None = None) -> str:
    rank = "" if virtual is None else f"rank={virtual}, "
    return (
        f"ShardSampler({setting['num_samples']}, {rank}world_size={setting['world_size']}, "
        f'shuffle={setting["shuffle"]}, seed={setting["seed"]}, tail="{setting["tail"]}")'
    )


def _tail_problem(setting: Values, lists: list[np.ndarray], same_order: bool = True) -> str | None:
    """What is wrong with the way the samples were dealt out, or None.

    Args:
        same_order: all ranks deal from the same permutation; if not, only the numbers of samples
            are judged.
    """
    n, world_size, tail = setting["num_samples"], setting["world_size"], setting["tail"]
    lengths = [len(indices) for indices in lists]
    times = np.bincount(np.concatenate(lists), minlength=n)
    if tail == "uneven":
        if max(lengths) - min(lengths) > 1:
            return f"ranks yield {lengths} samples: more than one apart"
    else:
        each = -(-n // world_size) if tail == "pad" else n // world_size
        if lengths != [each] * world_size:
            return f"expected {each} samples on every rank, got {lengths}"
    if not same_order:
        return None
    if tail != "drop" and (times == 0).any():
        lost = f"sample {int(np.argmin(times))} is on no rank"
        twice, padding = int((times > 1).sum()), max(sum(lengths) - n, 0)
        if not setting["shuffle"] or twice <= padding:
            return lost
        return (
            f"{lost}, and {twice} samples are there more than once. Do all ranks draw the same "
            "permutation? Each is a process of its own"
        )
    if tail != "pad" and (times > 1).any():
        return f"sample {int(np.argmax(times))} comes {int(times.max())} times"
    return None


def judge_partition(case: Case) -> Iterator[Finding]:
    """Every sample is on exactly one rank: ascending without shuffling, permuted with shuffling.

    Ranks may get strides or blocks of the order.
    """
    for rank, answer in enumerate(case.answers):
        if kind := answer.get("no int"):
            text = f"an index from ShardSampler: expected an int, got {str(kind)[:60]}."
            yield Finding(text, rank)
    for number, setting in enumerate(case.inputs[0]["settings"]):
        lists = _collect(case, number, setting)
        if isinstance(lists, Finding):
            yield lists
            continue
        problem = _tail_problem(setting, lists)
        ordered = all((np.diff(indices) > 0).all() for indices in lists)
        if problem is None and not setting["shuffle"] and not ordered:
            problem = "without shuffling each rank's indices should ascend"
        if problem is None and setting["shuffle"] and ordered:
            problem = "shuffle=True left the samples in order"
        steps = np.diff(lists[0]) % setting["num_samples"]
        if problem is None and setting["shuffle"] and len(np.unique(steps)) < 3:
            problem = "shuffle=True only shifted or turned the order, it is no random permutation"
        if problem:
            yield Finding(f"{_where(setting)}: {problem}.")


_MOVED = (
    "moved torch's global generator, which dropout and initialisation draw from; putting it back "
    "at the end of an iteration is too late. Use a torch.Generator of your own."
)


def judge_tail(case: Case) -> Iterator[Finding]:
    """Each tail setting deals out the samples as it should.

    The student chooses which rank gets which sample, which ranks have one more with "uneven", which
    samples "drop" loses (but not the same ones in each epoch), and which ones "pad" repeats and how
    often.
    """
    settings = case.inputs[0]["settings"]
    twins = [
        k for k, setting in enumerate(settings) if setting["shuffle"] and "twin" not in setting
    ]
    for rank, answer in enumerate(case.answers):
        moved = told(answer, "moved")
        # `judge_epoch` judges a generator that is moved where no tail is to be filled up.
        if moved != [] and not (isinstance(moved, list) and any(k in moved for k in twins)):
            yield Finding(f"sizes that do not divide: __iter__ {_MOVED}", rank)
    for number, setting in enumerate(settings[: twins[0]]):
        lost = set(range(setting["num_samples"]))
        for visit in range(len(setting["epochs"])):
            lists = _collect(case, number, setting, visit)
            if isinstance(lists, Finding):
                yield lists
                break
            same_order = "twin" not in setting or _is_partition(case, setting["twin"], visit)
            if problem := _tail_problem(setting, lists, same_order):
                yield Finding(f"{_where(setting)}{_when(setting, visit)}: {problem}.")
                break
            lost -= set(np.concatenate(lists).tolist())
        else:
            epochs = len(setting["epochs"])
            if lost and setting["shuffle"] and epochs > 1 and _moves_samples(case, setting["twin"]):
                yield Finding(
                    f"{_where(setting)}: sample {min(lost)} is dropped in each of {epochs} epochs, "
                    "so nobody ever sees it. Shuffle all samples, then cut."
                )


def _moves_samples(case: Case, number: int) -> bool:
    """Whether rank 0 gets different samples in one epoch and the next, as `judge_epoch` wants."""
    first, second = (
        _collect(case, number, case.inputs[0]["settings"][number], visit) for visit in (0, 1)
    )
    if isinstance(first, Finding) or isinstance(second, Finding):
        return False
    return set(first[0].tolist()) != set(second[0].tolist())


def _is_partition(case: Case, number: int, visit: int) -> bool:
    """Whether every sample of a setting whose size divides is on exactly one rank."""
    setting = case.inputs[0]["settings"][number]
    lists = _collect(case, number, setting, visit)
    return not isinstance(lists, Finding) and _tail_problem(setting, lists) is None


def judge_epoch(case: Case) -> Iterator[Finding]:
    """A different epoch or seed gives a different order; the same epoch gives the same order.

    Whether the ranks' shares fit together is judged by `judge_partition`. Any generator will do but
    torch's global one.
    """
    orders: dict[tuple[int, bool], list[np.ndarray]] = {}
    for number, setting in enumerate(case.inputs[0]["settings"]):
        visits: list[np.ndarray] = []
        shares: list[np.ndarray] = []
        for visit in range(len(setting["epochs"])):
            lists = _collect(case, number, setting, visit, judges_length=False)
            if isinstance(lists, Finding):
                yield lists
                return
            visits.append(np.concatenate(lists))
            shares.append(np.sort(lists[0]))
        epochs = setting["epochs"]
        if epochs[0] is None:
            if not np.array_equal(visits[0], visits[1]):
                yield Finding(
                    f"{_where(setting)}: before the first set_epoch the order should be epoch 0's."
                )
            elif not np.array_equal(visits[0], visits[3]):
                yield Finding(f"{_where(setting)}: set_epoch(0) does not go back to epoch 0.")
            orders.setdefault((setting["world_size"], True), []).append(visits[0])
            continue
        has_same_share = np.array_equal(shares[0], shares[1])
        has_same_order = np.array_equal(visits[0], visits[1])  # judged below
        if setting["world_size"] > 1 and has_same_share and not has_same_order:
            yield Finding(
                f"{_where(setting)}: rank 0 has the same samples in epochs {epochs[0]} and "
                f"{epochs[1]}, in a different order. Permute all samples first, then deal them out."
            )
        for a, b in ((0, 1), (1, 2), (0, 2)):
            if np.array_equal(visits[a], visits[b]):
                yield Finding(
                    f"{_where(setting)}: epochs {epochs[a]} and {epochs[b]} have the same order. "
                    "set_epoch must change what __iter__ draws, with every seed."
                )
        if not np.array_equal(visits[3], visits[4]):
            yield Finding(
                f"{_where(setting)}: epoch {epochs[0]} came in two different orders when it was "
                "iterated twice after one set_epoch."
            )
        if not np.array_equal(visits[0], visits[3]):
            yield Finding(
                f"{_where(setting)}: epoch {epochs[0]} came in two different orders. "
                "The order must depend on seed and epoch alone."
            )
        orders.setdefault((setting["world_size"], False), []).append(visits[0])
    for (world_size, is_first), visited in orders.items():
        if any(np.array_equal(a, b) for a, b in combinations(visited, 2)):
            when = " in epoch 0" if is_first else ""
            yield Finding(f"world_size={world_size}: two seeds gave one order{when}.")
    for rank, answer in enumerate(case.answers):
        if told(answer, "moved") != []:
            yield Finding(f"__init__, set_epoch or __iter__ {_MOVED}", rank)
