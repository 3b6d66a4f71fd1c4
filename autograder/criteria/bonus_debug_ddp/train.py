"""Criteria for the whole script: data, shares, epochs, old gradients, and what is saved.

Each criterion draws data that shows only the criterion's own bug. Equal rows hide which rank gets
which sample. Data that ignores the generator hides how the generator was seeded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autograder.criteria.bonus_debug_ddp.causes import because
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

FEATURES, CLASSES = 5, 4
LR = 0.3
PER_RANK = 6  # samples of each rank


class SamplesSeen:
    """The samples on which a model and its copies were trained.

    A copy that is trained in place of the model costs only `debug_train_zero_grad`.
    """

    def __init__(self, path: Path | None) -> None:
        self.seen: list[float] = []
        self.sizes: list[int] = []  # of the batches
        self.path, self.was_saved = path, False
        self.trained: nn.Module | None = None  # the one that went forward last

    def __deepcopy__(self, memo: Any) -> SamplesSeen:
        return self

    def add(self, model: nn.Module, x: torch.Tensor) -> None:
        """Notes one forward pass of training."""
        self.seen += x[:, 0].detach().cpu().tolist()
        self.sizes.append(len(x))
        self.was_saved = self.path is not None and self.path.exists()
        self.trained = model


class Recorded(nn.Module):
    """A linear classifier that records the first column of its training inputs.

    It also records whether there was a file at `path` in its last forward pass of training. The
    name of a buffer contains "module.". So the names are wrong in a file without buffers, and in
    one where every "module." was removed.
    """

    def __init__(
        self, inputs: Values, dtype: torch.dtype = torch.float32, path: Path | None = None
    ) -> None:
        super().__init__()
        self.classify = oracle.mlp(inputs, dtype)
        self.meter_module = nn.Module()
        self.meter_module.register_buffer("scale", torch.ones(1))
        self.record = SamplesSeen(path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.record.add(self, x)
        return self.classify(x)


# --- draw ----------------------------------------------------------------------------------------


def _draw(draw: Draw, num_epochs: int, *, missing: int = 0, **options: Any) -> list[Values]:
    """The same weights, seed and data on every rank; `missing` samples make the shares uneven."""
    rng = draw.shared()
    n = draw.world_size * PER_RANK - missing
    values = oracle.draw_parameters(rng, (FEATURES, CLASSES)) | options
    values |= {"seed": int(rng.integers(10_000)), "num_epochs": num_epochs, "n": n}
    values["x"] = rng.normal(size=(n, FEATURES)).astype(np.float32)
    values["y"] = rng.integers(CLASSES, size=n)
    if options["equal_rows"]:
        values["x"][:], values["y"][:] = values["x"][0], values["y"][0]
    else:
        # The first column identifies the sample.
        values["x"][:, 0] = rng.permutation(n) / np.float32(n if options.get("small") else 1)
    return [dict(values) for _ in range(draw.world_size)]


def draw_data(draw: Draw) -> list[Values]:
    """Two epochs; all rows of a dataset are equal, and they depend on the generator."""
    return _draw(draw, 2, equal_rows=True, generated=True, batch_size=PER_RANK)


def draw_shares(draw: Draw) -> list[Values]:
    """One epoch over rows that can be told apart; the ranks cannot share them evenly.

    A rank's last batch is smaller than the others, and belongs to its share, too. A rank whose
    share is not filled up has no such batch: its steps are fewer than those of the others.
    """
    missing, size = int(draw.world_size > 1), PER_RANK - 1
    return _draw(draw, 1, missing=missing, equal_rows=False, generated=False, batch_size=size)


def draw_epochs(draw: Draw) -> list[Values]:
    """Three epochs over rows that can be told apart; the seed is 0, which no factor changes."""
    inputs = _draw(draw, 3, equal_rows=False, generated=False, batch_size=3)
    return [values | {"seed": 0} for values in inputs]


def draw_zero_grad(draw: Draw) -> list[Values]:
    """A whole batch and a smaller one per epoch, on rows that can be told apart.

    The rows are so large that the gradient's norm is above 1, a usual limit for clipping.
    """
    options = {"equal_rows": False, "generated": False, "small": True, "itself": True}
    inputs = _draw(draw, 2, batch_size=4, **options)
    inputs[0]["x"][:, 1:] *= 4  # all ranks share this array
    return inputs


def draw_saved(draw: Draw) -> list[Values]:
    """Two epochs of one step; the rate is so large that the first step goes too far.

    The loss is larger after the second epoch, but its weights have to be saved, too.
    """
    inputs = _draw(draw, 2, equal_rows=True, generated=False, batch_size=PER_RANK)
    for values in inputs:
        values["lr"] = 1e4
        values["y"] = np.arange(values["n"]) % CLASSES  # no rank has one class alone
    return inputs


def _dataset(inputs: Values, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """What `make_data` returns: equal rows, drawn from the generator."""
    x = torch.randn(1, FEATURES, generator=generator).repeat(inputs["n"], 1)
    y = torch.randint(CLASSES, (1,), generator=generator).repeat(inputs["n"])
    return x, y


# --- observe -------------------------------------------------------------------------------------


def observe(train: Any, inputs: Values, context: Context) -> Values:
    """`_observe`, with a different seed of the default generator on each rank, as for dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.rank)
        return _observe(train, inputs, context)


def _observe(train: Any, inputs: Values, context: Context) -> Values:
    """Trains once; returns the weights, the samples in their order, and the file's content."""

    def make_data(generator: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        if inputs["generated"]:
            return _dataset(inputs, generator)
        return torch.from_numpy(inputs["x"].copy()), torch.from_numpy(inputs["y"].copy())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        model = Recorded(inputs, path=path).to(context.device)
        if inputs.get("itself"):
            set_old_gradients(model)
        train(
            model,
            make_data,
            seed=inputs["seed"],
            num_epochs=inputs["num_epochs"],
            batch_size=inputs["batch_size"],
            lr=inputs.get("lr", LR),
            path=path,
        )
        record = model.record
        answer: Values = {"seen": np.array(record.seen), "written": path.exists()}
        answer["saved before"], answer["sizes"] = record.was_saved, record.sizes[:500]
        if path.exists() and context.rank == 0:
            answer |= _read(path)
    trained = model if inputs.get("itself") else record.trained or model
    for name, value in trained.state_dict().items():
        answer[name] = value.detach().cpu().numpy().copy()
    return answer


def _read(path: Path) -> Values:
    """The names and tensors in the file; any other content costs only `debug_train_saved`."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the student has written
        return {"unreadable": str(error)}
    if not isinstance(saved, Mapping):
        return {"unreadable": f"it holds a {type(saved).__name__}"}
    tensors = {k: v for k, v in saved.items() if isinstance(v, torch.Tensor)}
    values = {f"saved {key}": value.detach().numpy().copy() for key, value in tensors.items()}
    return values | {"keys": [str(key) for key in saved]}


def set_old_gradients(model: nn.Module) -> None:
    """Puts gradients into the model, as an earlier use of the model would leave them."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)


# --- judge ---------------------------------------------------------------------------------------

SHAPES = {"classify.0.weight": (CLASSES, FEATURES), "classify.0.bias": (CLASSES,)}
NAMES = tuple(SHAPES)


def _judge_weights(
    case: Case, expected: dict[str, np.ndarray], hint: str, explain: Callable[[int], str]
) -> Iterator[Finding]:
    for rank, answer in enumerate(case.answers):
        for name in NAMES:
            what = f"{name} after training"
            if wrong := oracle.differs(rank, what, answer.get(name), expected[name]):
                yield because(wrong, hint + explain(rank))
                break


def judge_data(case: Case) -> Iterator[Finding]:
    """All ranks train on the same dataset, the one of `seed`, in both epochs."""
    inputs = case.inputs[0]
    x, _ = _dataset(inputs, torch.Generator().manual_seed(inputs["seed"]))
    is_right: list[int] = []
    for rank, answer in enumerate(case.answers):
        seen = answer.get("seen")
        if not is_floats(seen) or not seen.size:
            yield Finding("no samples went through the model.", rank)
        elif not (right := np.abs(seen - x[0, 0].item()) <= 1e-5).all():  # false for nan
            what = "some samples are not" if right.any() else "no sample is"
            epochs = [part.all() for part in np.array_split(right.ravel(), 2)]
            why = "Do all ranks share out one dataset, the same in every epoch?"
            if epochs == [True, False]:
                why = "In epoch 0 all are: draw the dataset once, before the epochs."
            elif 0 in is_right and not right.any():
                why = "Rank 0's are: a generator seeded with `seed` gives all ranks one dataset."
            yield Finding(f"{what} of the dataset of `seed`. {why}", rank)
        else:
            is_right.append(rank)


def judge_zero_grad(case: Case) -> Iterable[Finding]:
    """Every step uses the mean gradient of the ranks' batches, and nothing else.

    The recorded inputs tell which samples each rank took in which step. Other criteria check how
    the samples are distributed over the ranks.
    """
    steps = _steps_seen(case)
    if isinstance(steps, Finding):
        return [steps]
    inputs = case.inputs[0]
    model = Recorded(inputs, torch.float64)
    start = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    for rank, answer in enumerate(case.answers):
        if all(oracle.agrees(answer.get(name), start[name]) for name in NAMES):
            return [Finding("`model` still has its first weights: train it, not a copy.", rank)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = torch.from_numpy(inputs["x"]).double(), torch.from_numpy(inputs["y"])
    for step in steps:
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x[rows]), y[rows]) for rows in step]
        torch.stack(losses).mean().backward()
        optimizer.step()
    right = {name: value.numpy() for name, value in model.state_dict().items()}
    hint = f"Expected what {len(steps)} plain steps with the mean gradient of all ranks give. "
    return _judge_weights(case, right, hint, partial(_explain_steps, case, steps))


def _explain_steps(case: Case, steps: list[list[list[int]]], rank: int) -> str:
    """A hint: the known mistake that gives this rank's weights."""
    inputs, answer = case.inputs[0], case.answers[rank]
    sizes, size = told(answer, "sizes"), inputs["batch_size"]
    usual = {str(size), str(PER_RANK % size)}
    if isinstance(sizes, list) and (other := sorted({str(n) for n in sizes} - usual)):
        return (
            f"Batches of {', '.join(other)} samples went through this rank's model: "
            f"batch_size={size} is that of one rank."
        )
    for cleared, ranks, factor, hint in _known_mistakes(case, len(steps), rank):
        values = _after(case, steps, cleared, ranks, factor)
        if all(oracle.agrees(answer.get(name), values[name].numpy()) for name in NAMES):
            return hint
    return (
        "Is every rank's gradient in each step, and no older one? A plain step is `lr` times the "
        "mean gradient, without momentum."
    )


def _known_mistakes(
    case: Case, num_steps: int, rank: int
) -> Iterator[tuple[range, Sequence[int], Callable[[int], float], str]]:
    """Per mistake: the steps that clear gradients, the ranks that count, a factor, and the hint.

    The factor depends on a batch's size, and multiplies the batch's mean gradient.
    """
    every, everyone, w = range(num_steps), range(case.world_size), case.world_size
    size, per_epoch = case.inputs[0]["batch_size"], -(-num_steps // case.inputs[0]["num_epochs"])
    hint = "Each step still holds the gradients of the steps before it: clear them before "
    yield range(0), everyone, _once, f"{hint}backward()."
    hint = "The first step still holds gradients that `model` had before: clear them before "
    yield every[1:], everyone, _once, f"{hint}backward(), not after the step."
    hint = "Each step still holds the gradients of the epoch's earlier steps: clear them before "
    yield every[::per_epoch], everyone, _once, f"{hint}each backward()."
    hint = "This rank's own gradient alone was stepped with: in DDP, backward() averages it over "
    yield every, [rank], _once, f"{hint}the ranks."
    hint = "use `lr` as it is, and means over the ranks and over a batch's samples, not sums."
    yield every, everyone, lambda n: n, f"A batch counted as often as it has samples: {hint}"
    if w > 1:
        yield every, everyone, lambda _: w, f"Each step was {w} times too long: {hint}"
        hint = "use `lr` as it is, and divide by the number of ranks once, as DDP does."
        yield every, everyone, lambda _: 1 / w, f"Each step was {w} times too short: {hint}"
    hint = "A batch with fewer samples than batch_size gave a shorter step: use the mean over its"
    yield every, everyone, lambda n: n / size, f"{hint} own samples."


def _once(_: int) -> float:
    return 1.0


def _after(
    case: Case,
    steps: list[list[list[int]]],
    cleared: range,
    ranks: Sequence[int],
    factor: Callable[[int], float],
) -> dict[str, torch.Tensor]:
    """The weights after steps with a known mistake."""
    inputs = case.inputs[0]
    x, y = torch.from_numpy(inputs["x"]).double(), torch.from_numpy(inputs["y"])
    model = Recorded(inputs, torch.float64)
    set_old_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number, step in enumerate(steps):
        if number in cleared:
            optimizer.zero_grad()
        parts = [step[r] for r in ranks]
        losses = [factor(len(part)) * F.cross_entropy(model(x[part]), y[part]) for part in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model.state_dict()


def _steps_seen(case: Case) -> list[list[list[int]]] | Finding:
    """Per step the rows that each rank took, or a finding if the records do not tell them."""
    inputs = case.inputs[0]
    place = {round(float(v) * inputs["n"]): row for row, v in enumerate(inputs["x"][:, 0])}
    batches = []
    for rank, answer in enumerate(case.answers):
        seen = answer.get("seen")
        if not is_floats(seen) or seen.ndim != 1:
            return Finding("no samples went through the model.", rank)
        numbers = [round(float(v) * inputs["n"]) if np.isfinite(v) else -1 for v in seen]
        per_epoch, rest = divmod(len(numbers), inputs["num_epochs"])
        if not numbers or rest or not set(numbers) <= set(place):
            return Finding(
                f"{len(numbers)} samples in {inputs['num_epochs']} epochs went through this rank's "
                "model; expected those of the dataset, as many in each epoch.",
                rank,
            )
        rows = [place[number] for number in numbers]
        size = inputs["batch_size"]
        batches.append(
            [
                rows[epoch * per_epoch : (epoch + 1) * per_epoch][start : start + size]
                for epoch in range(inputs["num_epochs"])
                for start in range(0, per_epoch, size)
            ]
        )
    if len({len(own) for own in batches}) > 1:
        return Finding(f"the ranks took {[len(own) for own in batches]} steps.")
    return [list(step) for step in zip(*batches, strict=True)]


def _epochs(case: Case) -> list[list[np.ndarray]] | Finding:
    """Per epoch and rank the sample numbers, or a finding if the records are wrong."""
    inputs = case.inputs[0]
    expected = -(-inputs["n"] // case.world_size)
    rows = []
    for rank, answer in enumerate(case.answers):
        seen = answer.get("seen")
        if not is_floats(seen) or seen.ndim != 1:
            return Finding("no samples went through the model.", rank)
        per_epoch, rest = divmod(len(seen), inputs["num_epochs"])
        if rest or per_epoch != expected:
            return Finding(
                f"{len(seen)} samples went through this rank's model in {inputs['num_epochs']} "
                f"epoch(s) over {inputs['n']} samples on {case.world_size} ranks, expected "
                f"{expected} in each. A DistributedSampler gives each rank its share, equally many "
                "to all.",
                rank,
            )
        rows.append(np.split(seen, inputs["num_epochs"]))
    return [list(epoch) for epoch in zip(*rows, strict=True)]


def judge_shares(case: Case) -> Iterator[Finding]:
    """In an epoch every sample goes through exactly one rank.

    Shares are padded to the same length, so a few samples come twice.
    """
    epochs = _epochs(case)
    if isinstance(epochs, Finding):
        yield epochs
        return
    for number, epoch in enumerate(epochs):
        numbers = np.unique(np.concatenate(epoch))
        expected = np.arange(case.inputs[0]["n"], dtype=np.float64)
        places = sum(map(len, epoch))
        if len(numbers) == places < len(expected):
            yield Finding(
                f"epoch {number}: {len(expected) - places} of {len(expected)} samples go through "
                "no rank: the last places are filled with a few that come twice, not cut off."
            )
            return
        if not np.array_equal(numbers, expected):
            yield Finding(
                f"epoch {number}: {len(numbers)} different samples in {sum(map(len, epoch))} "
                f"places, expected {len(expected)}, each on one rank. The ranks' shares overlap: "
                "all have to deal out one permutation, though their default generators differ. "
                "None is left out: a few that come twice fill the last places."
            )
            return


def judge_epochs(case: Case) -> Iterator[Finding]:
    """Every epoch has a different order, and no rank keeps its share."""
    epochs = _epochs(case)
    if isinstance(epochs, Finding):
        yield epochs
        return
    for a, b in ((0, 1), (1, 2), (0, 2)):
        for rank in range(case.world_size):
            if np.array_equal(epochs[a][rank], epochs[b][rank]):
                yield Finding(
                    f"epochs {a} and {b} have the same order: the sampler must be told the "
                    "epoch before each of them.",
                    rank,
                )
                return
    shares = [{frozenset(own.tolist()) for own in epoch} for epoch in epochs]
    if case.world_size > 1 and all(epoch == shares[0] for epoch in shares):
        yield Finding(
            "the ranks have the same shares in every epoch, only in another order or handed on: "
            "deal all samples out anew, from another permutation of the whole dataset."
        )


def judge_saved(case: Case) -> Iterator[Finding]:
    """Only rank 0 has written a file, with the module's weights under the module's names."""
    written = [told(answer, "written") for answer in case.answers]
    wrong_ranks = [rank for rank, is_there in enumerate(written) if is_there is not (rank == 0)]
    for rank in wrong_ranks:
        yield Finding(
            f"a file at `path`: {written[rank]}, expected {rank == 0}. Rank 0 writes, and no other "
            "rank.",
            rank,
        )
    if wrong_ranks:
        return
    answer = case.answers[0]
    if told(answer, "saved before") is not True:
        yield Finding(
            "there was no file yet in the last of two epochs: save after each epoch, or a job that "
            "dies has nothing.",
            0,
        )
        return
    if unreadable := told(answer, "unreadable"):
        yield Finding(
            f"torch.load(path) gives no state_dict: {str(unreadable).split('. ')[0][:160]}. Save "
            "model.state_dict(), not the model itself.",
            0,
        )
        return
    keys, names = told(answer, "keys"), sorted(Recorded(case.inputs[0]).state_dict())
    if not isinstance(keys, list) or sorted(map(str, keys)) != names:
        yield Finding(
            f"the file has the names {keys}, the model's state_dict {names}. "
            + (
                "Whoever loads it has no DDP around the model."
                if isinstance(keys, list) and any(str(k).startswith("module.") for k in keys)
                else "All of these, and these alone, are the model's weights and buffers."
            ),
            0,
        )
        return
    for name in NAMES:
        trained = answer.get(name)
        if not is_floats(trained, SHAPES[name]):
            yield Finding(
                f"{name}: expected a trained model with values of shape {list(SHAPES[name])}.", 0
            )
            return
        what = f"{name} in the file, compared with the trained model"
        # Not `oracle.differs`: its tolerance depends on the largest value, which the rank chooses.
        if wrong := differs(
            0,
            what,
            answer.get(f"saved {name}"),
            trained,
            rtol=oracle.RTOL["float32"],
            atol=1e-6,
            hint="The file has the weights as they are after each epoch, also if the loss has "
            "become larger.",
        ):
            yield wrong
            return
