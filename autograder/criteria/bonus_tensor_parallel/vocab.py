"""Criteria for the embedding and the loss that are split along the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autograder.criteria.bonus_tensor_parallel.model import fill, numbers, tensor, wrong_answer
from autograder.criteria.bonus_tensor_parallel.traffic import (
    SLACK_BYTES,
    WHEN_RIGHT,
    cost,
    passes_of,
    shared,
)
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, read_tensor
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

WIDTH, PER_RANK = 5, 6
LARGE = 1_000.0  # its exponential overflows float64


# --- embedding -----------------------------------------------------------------------------------


def draw_embedding(source: Draw) -> list[Values]:
    """Two tables, tokens from every rank's part, a gradient; the same on all ranks."""
    rng, n = source.shared(), source.world_size
    size = n * PER_RANK
    tokens = np.concatenate([rng.permutation(size), rng.integers(0, size, size)]).reshape(2, 2, -1)
    values: Values = {
        "table": rng.normal(size=(size, WIDTH)),
        "other": rng.normal(size=(size, WIDTH)),
        "tokens": tokens.astype(np.int64),
        "gy": rng.normal(size=(*tokens.shape, WIDTH)),
    }
    return [dict(values) for _ in range(n)]


def _embedding(table: np.ndarray, context: Context) -> nn.Embedding:
    full = nn.Embedding(*table.shape, dtype=torch.float64)
    fill(full, table, None)
    return full.to(context.device)


def observe_embedding(build: Any, inputs: Values, context: Context) -> Values:
    """The rows that the module holds; its output and gradient with rows of a different table."""
    n, rank = context.world_size, context.rank
    module = build(_embedding(inputs["other"], context))
    answer: Values = {"held": numbers(module.weight)}
    fill(module, np.split(inputs["table"], n)[rank], None)
    tokens = torch.from_numpy(inputs["tokens"].copy()).to(context.device)
    y = read_tensor(module(tokens), "forward()")
    y.backward(tensor(inputs["gy"], context))
    answer |= {"y": numbers(y), "grad": numbers(module.weight.grad)}
    answer["tokens"] = tokens.cpu().numpy()
    try:
        build(_embedding(np.zeros((n * PER_RANK + 1, WIDTH)), context))
        answer["refused"] = False
    except ValueError:
        answer["refused"] = True
    return answer


def judge_embedding(case: Case) -> Iterator[Finding]:
    """Requires the rank's own rows, the sum of all ranks' lookups, and its rows' gradients."""
    n, values = case.world_size, case.inputs[0]
    gradient = np.zeros_like(values["table"])
    np.add.at(gradient, values["tokens"].ravel(), values["gy"].reshape(-1, WIDTH))
    for rank, answer in enumerate(case.answers):
        held, grad = (np.split(each, n)[rank] for each in (values["other"], gradient))
        hint = "A rank that does not own a token gives zeros for it, not row 0 or its last row."
        y, right = answer.get("y"), values["table"][values["tokens"]]
        if isinstance(y, np.ndarray) and y.shape == right.shape:
            missing = ~np.isclose(y, right, rtol=1e-3).all(axis=-1)
            if missing.any() and not y[missing].any():
                token = int(values["tokens"][missing][0])
                hint = (
                    f"No rank gives a row for token {token}, which is a row of rank "
                    f"{token // PER_RANK}: is it taken for somebody else's there?"
                )
        if wrong := (
            wrong_answer(case, "held", rank, "VocabParallelEmbedding(full).weight", held)
            or wrong_answer(case, "y", rank, "output", values["table"][values["tokens"]], hint)
            or wrong_answer(case, "grad", rank, "gradient of the rows", grad)
        ):
            yield wrong
        elif not np.array_equal(answer.get("tokens", ()), values["tokens"]):
            yield Finding("the tokens were changed; work on a copy.", rank)
        elif n > 1 and answer.get("refused") is not True:
            yield Finding(
                f"a vocabulary of {n * PER_RANK + 1} on {n} ranks: expected a ValueError.", rank
            )


# --- loss ----------------------------------------------------------------------------------------


def _draw_loss(source: Draw, offset: np.ndarray, per_rank: int = PER_RANK) -> list[Values]:
    rng, n = source.shared(), source.world_size
    size = n * per_rank
    targets = np.concatenate([rng.permutation(size), rng.integers(0, size, size)]).reshape(2, -1)
    logits = rng.normal(0, 2, (*targets.shape, size))
    logits += offset if offset.size == 1 else np.repeat(offset, per_rank)
    common: Values = {"targets": targets.astype(np.int64), "factor": float(rng.uniform(2, 3))}
    return [common | {"logits": part} for part in np.split(logits, n, axis=-1)]


def draw_loss(source: Draw) -> list[Values]:
    """Logits of each rank's columns, targets from the whole vocabulary, a factor for the loss."""
    return _draw_loss(source, np.zeros(1))


def draw_stable(source: Draw) -> list[Values]:
    """Logits near LARGE in one rank's columns; `low` is the same draw, all near -LARGE."""
    offset = np.zeros(source.world_size)
    offset[int(source.shared("which").integers(source.world_size))] = LARGE
    high, low = _draw_loss(source, offset), _draw_loss(source, np.array([-LARGE]))
    return [a | {"low": b["logits"]} for a, b in zip(high, low, strict=True)]


def observe_cut(cross_entropy: Any, inputs: Values, context: Context) -> Values:
    """The loss of logits that are not contiguous: the last tokens have been cut off."""
    longer = tensor(np.concatenate([inputs["logits"]] * 2, axis=1), context)
    logits = longer[:, : inputs["logits"].shape[1]].requires_grad_()
    targets = torch.from_numpy(inputs["targets"].copy()).to(context.device)
    answer = {"loss": numbers(cross_entropy(logits, targets)), "logits": numbers(logits)}
    return answer | {"targets": targets.cpu().numpy()}


def _loss_of(cross_entropy: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss from which a backward pass can begin."""
    loss = read_tensor(cross_entropy(logits, targets), "vocab_parallel_cross_entropy")
    if not loss.requires_grad:
        raise RuntimeError("vocab_parallel_cross_entropy: the loss has no graph for a backward")
    return loss


def observe_gradient(cross_entropy: Any, inputs: Values, context: Context) -> Values:
    """The logits' gradient of the loss times a factor."""
    logits = tensor(inputs["logits"], context, grad=True)
    targets = torch.from_numpy(inputs["targets"].copy()).to(context.device)
    loss = _loss_of(cross_entropy, logits, targets)
    (loss * inputs["factor"]).backward()
    return {"loss": numbers(loss), "grad": numbers(logits.grad)}


def observe_stable(cross_entropy: Any, inputs: Values, context: Context) -> Values:
    """The losses of both sets of logits."""
    targets = torch.from_numpy(inputs["targets"].copy()).to(context.device)
    return {
        name: numbers(cross_entropy(tensor(inputs[key], context, grad=True), targets))
        for name, key in (("loss", "logits"), ("low", "low"))
    }


def _solve(case: Case, key: str = "logits") -> tuple[np.ndarray, np.ndarray]:
    """The loss, and the gradient of the whole logits, as one process computes them."""
    whole = torch.from_numpy(np.concatenate([v[key] for v in case.inputs], axis=-1))
    whole.requires_grad_()
    targets = torch.from_numpy(case.inputs[0]["targets"])
    loss = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    (loss * case.inputs[0]["factor"]).backward()
    return numbers(loss), numbers(whole.grad)


def _own_maxima(case: Case, key: str) -> np.ndarray:
    """The loss if each rank subtracts the largest logit of its own columns."""
    parts = np.stack([values[key] for values in case.inputs])
    parts = parts - parts.max(axis=-1, keepdims=True)
    whole, targets = np.concatenate(parts, axis=-1), case.inputs[0]["targets"]
    at_target = np.take_along_axis(whole, targets[..., None], axis=-1)[..., 0]
    return np.asarray((np.log(np.exp(whole).sum(axis=-1)) - at_target).mean())


def judge_loss(case: Case) -> Iterator[Finding]:
    """Requires the same mean loss on all ranks, and unchanged arguments."""
    loss, _ = _solve(case)
    for rank, answer in enumerate(case.answers):
        if wrong := wrong_answer(
            case,
            "loss",
            rank,
            "loss",
            loss,
            "The maximum, the sum of exponentials and the target's logit are those of the whole "
            "vocabulary; only one rank owns a target.",
        ):
            yield wrong
            continue
        if not all(
            np.array_equal(answer.get(name, ()), case.inputs[rank][name])
            for name in ("logits", "targets")
        ):
            yield Finding("logits or targets were changed; work on copies.", rank)


def judge_gradient(case: Case) -> Iterator[Finding]:
    """Requires, for own columns, (softmax - one-hot) / tokens times the incoming gradient.

    If the loss is wrong, too, only the loss is reported, because the gradient follows from it. The
    backward pass may be autograd's or the student's own.
    """
    loss, whole = _solve(case)
    n, factor = case.world_size, case.inputs[0]["factor"]
    for rank, answer in enumerate(case.answers):
        right = np.split(whole, n, axis=-1)[rank]
        hint, got = "", answer.get("grad")
        if isinstance(got, np.ndarray) and oracle.agrees(got, right / factor, "float64"):
            hint = "That is the gradient of the loss itself: multiply by the gradient that came in."
        if wrong := wrong_answer(case, "grad", rank, "gradient of the logits", right, hint):
            yield wrong_answer(case, "loss", rank, "loss, before its gradient", loss) or wrong


def judge_stable(case: Case) -> Iterator[Finding]:
    """Requires the right loss if exponentials overflow, and if all of them underflow to zero."""
    for rank in range(case.world_size):
        for name, key, words in (
            ("loss", "logits", f"logits near {LARGE:g} on one rank"),
            ("low", "low", f"logits near {-LARGE:g}"),
        ):
            loss, _ = _solve(case, key)
            got, hint = case.answers[rank].get(name), ""
            if is_floats(got) and not np.isfinite(got).all():
                hint = "Subtract the largest logit of all ranks before you take exponentials."
            elif is_floats(got, loss.shape) and oracle.agrees(got, _own_maxima(case, key)):
                hint = (
                    "That fits a different maximum on each rank: it is that of all ranks' logits."
                )
            if wrong := wrong_answer(case, name, rank, f"loss, {words}", loss, hint):
                yield wrong
                break


# --- traffic -------------------------------------------------------------------------------------

COLUMNS, NUMBERS = 40, 6  # columns of each rank; numbers that may travel per token


def draw_traffic(source: Draw) -> list[Values]:
    """The inputs of `draw_loss` with more columns per rank."""
    return _draw_loss(source, np.zeros(1), COLUMNS)


def observe_traffic(cross_entropy: Any, inputs: Values, context: Context) -> Values:
    """One loss and its backward pass."""
    logits = tensor(inputs["logits"], context, grad=True)
    targets = torch.from_numpy(inputs["targets"].copy()).to(context.device)
    context.broker.charge(0, "forward")
    loss = _loss_of(cross_entropy, logits, targets)
    context.broker.charge(0, "backward")
    loss.backward()
    return {"loss": numbers(loss)}


def judge_traffic(case: Case) -> Iterator[Finding]:
    """Requires that only a few numbers travel per token, never a row of logits.

    Any numbers may travel, and the target's logit may travel with a sum or with the maximum.
    """
    tokens, (loss, _) = case.inputs[0]["targets"].size, _solve(case)
    for rank in range(case.world_size):
        sent = passes_of(case, rank)
        if isinstance(sent, Finding):
            yield sent
            continue
        if wrong := wrong_answer(case, "loss", rank, "loss", loss, WHEN_RIGHT):
            yield wrong
            continue
        events = sent["forward"] + sent["backward"]
        to_all = shared(case, events)
        if case.world_size > 1 and cost([e for e in events if e.key in to_all]) < 4 * tokens:
            yield Finding(
                "hardly a number per token was sent to all ranks, and none of them can know the "
                "others' logits: at least the sums of exponentials have to meet.",
                rank,
            )
            continue
        num_bytes = cost(events)
        if num_bytes > 8 * NUMBERS * tokens + SLACK_BYTES:
            yield Finding(
                f"{num_bytes / 8 / tokens:.1f} numbers were reduced per token of a vocabulary of "
                f"{COLUMNS * case.world_size}; three are enough (maximum, sum, target's logit). "
                "Logits stay where they are.",
                rank,
            )
