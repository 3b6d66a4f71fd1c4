"""Criteria for accumulation over ranks, of samples and tokens: values on a real process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import number_or_none
from autograder.criteria.common.training import wrap
from autograder.criteria.common.weights import (
    Gradient,
    are_close,
    batch_gradients,
    collect,
    present,
    show,
    weights_of,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab2_accumulation.memory import peak_of, too_much_memory

SIZES = (6, 14, 4)
SAMPLES = 3
IGNORED = -100


def _record(answer: Values, call: int, module: nn.Module, loss: Any) -> None:
    for i, p in enumerate(module.parameters()):
        answer[f"g{call}/{i}"] = oracle.grad_of(p).copy()
    number = number_or_none(loss)
    if number is not None:
        answer[f"loss/{call}"] = np.array(number)


# --- samples -------------------------------------------------------------------------------------


def draw_samples(draw: Draw) -> list[Values]:
    """The same weights; a different number of equal micro-batches per call, and data per rank."""
    rng = draw.shared()
    ks = [int(k) for k in rng.permutation([1, 3, 4])]
    start = oracle.draw_parameters(rng, SIZES) | {"ks": ks}
    return oracle.private_batches(draw, start, [(k, SAMPLES) for k in ks], SIZES)


def draw_again(draw: Draw) -> list[Values]:
    """Like `draw_samples`; the last call gets the very list of an earlier call once more."""
    inputs = draw_samples(draw)
    for values in inputs:
        again = values["ks"].index(3)
        values |= {f"{n}/3": values[f"{n}/{again}"] for n in "xy"}
        values |= {"ks": [*values["ks"], 3], "again": again}
    return inputs


def draw_classes(draw: Draw) -> list[Values]:
    """Like `draw_samples`; in one call the targets are classes, and the loss a cross-entropy."""
    inputs = draw_samples(draw)
    for rank, values in enumerate(inputs):
        shape = values["y/1"].shape[:2]
        values["y/1"] = draw.shared(f"classes {rank}").integers(SIZES[-1], size=shape)
    return inputs


def _loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy if the targets are classes, else the mean squared error."""
    if target.is_floating_point():
        return oracle.mse(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def observe_samples(accumulate_ddp: Any, inputs: Values, context: Context) -> Values:
    """Several accumulations with one wrapped model; between them gradients become None or zeros."""
    module = oracle.mlp(inputs).to(context.device)
    ddp = wrap(module, context)
    answer: Values = {}
    loss_fn = oracle.ordered(_loss_of, answer)
    lists: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for call in range(len(inputs["ks"])):
        module.zero_grad(set_to_none=call % 2 == 0)
        xs, ys = (torch.from_numpy(inputs[f"{n}/{call}"]).to(context.device) for n in "xy")
        again = "again" in inputs and call == len(inputs["ks"]) - 1
        lists.append(lists[inputs["again"]] if again else list(zip(xs, ys, strict=True)))
        loss = accumulate_ddp(ddp, lists[-1], loss_fn)
        _record(answer, call, module, loss)
    return answer


def judge_gradients(case: Case) -> list[Finding]:
    """Each of the W k micro-batches enters every rank's gradient with weight 1/(W k).

    The last micro-batch may synchronise, or the gradients may be sent after all of them.
    """

    def why(weights: np.ndarray, rank: int, k: int) -> str:
        ranks = case.world_size
        own = weights[rank * k : rank * k + k]
        others = np.delete(weights, slice(rank * k, rank * k + k))
        if are_close(weights, np.full(ranks * k, 1 / ranks)):
            return "Each loss has to be divided by the number of micro-batches."
        if are_close(weights, np.full(ranks * k, 1 / k)):
            return "That is the sum over ranks, not the mean."
        if ranks > 1 and are_close(weights, np.full(ranks * k, 1 / (ranks * ranks * k))):
            or_both = ", or by the number of micro-batches" if k == ranks else ""
            return f"That was divided once more by the number of ranks, as DDP does{or_both}."
        if are_close(weights, np.full(ranks * k, 1 / (ranks * k * k))):
            return "That was divided by the number of micro-batches twice."
        if others.size and np.abs(others).max() < 1e-3 and np.abs(own).max() > 0:
            return "Nothing of the other ranks is in it: the gradients were not synchronised."
        if len(senders := {i // k for i in present(weights)}) == 1:
            return f"Only the micro-batches of rank {min(senders)} are in it."
        missing = [set(range(k)) - set(present(part)) for part in weights.reshape(ranks, k)]
        if missing[0] and all(each == missing[0] for each in missing):
            return (
                "The same micro-batches are missing on every rank: they never went in (does a call "
                "change the list that it is given?), or their gradients were cleared."
            )
        if len(present(others)) < others.size:
            return (
                "Some micro-batches of other ranks are missing: what has been accumulated "
                "travels in the backward that synchronises, so that must be the last one."
            )
        if others.size and np.ptp(weights) < 1e-3:
            return "Is the number of ranks or micro-batches written into the code?"
        return ""

    swapped = (oracle.find_misused_loss(answer, rank) for rank, answer in enumerate(case.answers))
    findings = [finding for finding in swapped if finding]
    for call, k in enumerate(case.inputs[0]["ks"]):
        basis = [
            gradient
            for inputs in case.inputs
            for gradient in batch_gradients(
                inputs, list(zip(inputs[f"x/{call}"], inputs[f"y/{call}"], strict=True))
            )
        ]
        expected = [1 / (case.world_size * k)] * len(basis)
        what = f"call {call}, {k} micro-batches per rank"
        if "again" in case.inputs[0] and call == len(case.inputs[0]["ks"]) - 1:
            what += f", with the very list of call {case.inputs[0]['again']}"
        findings += [*_judge_weights(case, findings, call, k, basis, expected, what, why)]
    return findings


def _judge_weights(
    case: Case,
    findings: list[Finding],
    call: int,
    k: int,
    basis: list[Gradient],
    expected: Sequence[float],
    what: str,
    why: Any,
) -> Iterator[Finding]:
    """Judges the ranks on which nothing is wrong so far."""
    for rank, answer in enumerate(case.answers):
        if any(finding.rank == rank for finding in findings):
            continue
        got = collect(answer, f"g{call}", len(basis[0]))
        # Micro-batches may happen to hold the same tokens: then weights are not unique.
        right = weights_of([_weighted(basis, expected)], got)
        if right is not None and are_close(right, [1.0]):
            continue
        weights = weights_of(basis, got)
        if weights is None:
            yield Finding(
                f"{what}: p.grad is not a sum of gradients of the ranks' micro-batches.", rank
            )
        elif not are_close(weights, expected):
            per_rank = (
                f"rank {r}: {show(weights[r * k : r * k + k])}" for r in range(case.world_size)
            )
            yield Finding(
                f"{what}: they entered this gradient with weights {'; '.join(per_rank)}. Expected "
                f"{_expected(expected, k)}. {why(weights, rank, k)}".strip(),
                rank,
            )


def _weighted(basis: list[Gradient], weights: Sequence[float]) -> Gradient:
    return [np.tensordot(weights, np.stack(parts), axes=1) for parts in zip(*basis, strict=True)]


def _expected(weights: Sequence[float], k: int) -> str:
    if np.ptp(weights) < 1e-9:
        return f"{weights[0]:.3g} each"
    parts = (f"rank {r}: {show(weights[r * k : r * k + k])}" for r in range(len(weights) // k))
    return "; ".join(parts)


def judge_loss(case: Case) -> list[Finding]:
    """The returned loss is the mean over the samples of all ranks, on every rank.

    It may be a float or a tensor of one number, and travel in any way.
    """
    findings: list[Finding] = []
    model = oracle.mlp(case.inputs[0], torch.float64)
    for call, k in enumerate(case.inputs[0]["ks"]):
        losses = []
        for inputs in case.inputs:
            x, y = (torch.from_numpy(inputs[f"{n}/{call}"]) for n in "xy")
            losses.append(_loss_of(model(x.double()), y).item())
        for rank, answer in enumerate(case.answers):
            _judge_mean(findings, rank, answer.get(f"loss/{call}"), losses, k)
    return findings


def _judge_mean(
    findings: list[Finding], rank: int, got: Any, per_rank: Sequence[float], k: int
) -> None:
    if any(finding.rank == rank for finding in findings):
        return
    hint, mean = "", float(np.mean(per_rank))
    if isinstance(got, np.ndarray) and got.shape == ():
        if len(per_rank) > 1 and np.isclose(got, per_rank[rank], rtol=1e-4):
            hint = "That is this rank's own loss: average it over the ranks."
        elif np.isclose(got, mean / k, rtol=1e-4):
            hint = f"That is the mean divided by {k} once more."
        elif np.isclose(got, mean * len(per_rank), rtol=1e-4):
            hint = "That is the sum over ranks, not the mean."
    if wrong := oracle.differs(rank, "the returned loss", got, np.asarray(mean), hint=hint):
        findings.append(wrong)


# --- tokens --------------------------------------------------------------------------------------

VOCABULARY, WIDTH, TOKEN_CALLS = 11, 7, 2
SHAPES = ((2, 8), (1, 12), (3, 5))  # rows and context of sparse micro-batches
DENSE = (2, 150)  # more tokens than eight bits can count
MEMORY_K = 6


class TokenModel(nn.Module):
    """tokens [rows, context] -> logits [rows, context, vocabulary]."""

    def __init__(self, inputs: Values, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.from_numpy(inputs[f"p{i}"]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the targets that are not IGNORED."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def draw_tokens(draw: Draw) -> list[Values]:
    """Padded targets: token counts, at least 1, differ a lot between ranks and micro-batches.

    Shapes of micro-batches differ, too. In some full ones every target is token 0, which counts.
    """
    inputs = _draw_tokens(draw, SHAPES, DENSE)
    for values in inputs:
        for i in range(values["ks"][1]):
            targets = values[f"y/1/{i}"]
            if i % 2 and IGNORED not in targets:
                targets[:] = 0
    return inputs


def draw_equal_shapes(draw: Draw) -> list[Values]:
    """Like `draw_tokens`, but plain: one shape, padding only at the end, and no token 0."""
    return _draw_tokens(draw, SHAPES[:1], SHAPES[0], plain=True)


def _draw_tokens(
    draw: Draw, shapes: Sequence[tuple[int, int]], dense_shape: tuple[int, int], plain: bool = False
) -> list[Values]:
    rng = draw.shared()
    ks = [1, int(rng.integers(2, 5))]
    weights = ((VOCABULARY, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    start: Values = {f"p{i}": rng.normal(size=s).astype(np.float32) for i, s in enumerate(weights)}
    dense = int(rng.integers(draw.world_size))
    inputs = []
    for rank in range(draw.world_size):
        values, own = start | {"ks": ks}, draw.private(rank)
        for call, k in enumerate(ks):
            for i in range(k):
                # One rank has mostly full micro-batches, and every rank has one sparse one.
                sparse = rank != dense or (i == 0 and k > 1)
                # Beside a very large micro-batch, a wrong weight of a sparse one would not show.
                full_shape = dense_shape if call == 0 else SHAPES[0]
                shape = shapes[(rank + i) % len(shapes)] if sparse else full_shape
                values[f"x/{call}/{i}"] = own.integers(VOCABULARY, size=shape)
                targets = own.integers(int(plain), VOCABULARY, size=shape)
                count = int(own.integers(1, 5)) if sparse else targets.size
                places = np.arange(targets.size) if plain else own.permutation(targets.size)
                hidden = places[count:]
                targets.reshape(-1)[hidden] = IGNORED
                values[f"y/{call}/{i}"] = targets
        inputs.append(values)
    return inputs


def _token_batches(inputs: Values, call: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a call: tokens and targets."""
    names = [(f"x/{call}/{i}", f"y/{call}/{i}") for i in range(inputs["ks"][call])]
    return [(torch.from_numpy(inputs[x]), torch.from_numpy(inputs[y])) for x, y in names]


def observe_tokens(accumulate_tokens: Any, inputs: Values, context: Context) -> Values:
    """Accumulations over padded micro-batches with one wrapped model."""
    module = TokenModel(inputs).to(context.device)
    ddp = wrap(module, context)
    answer: Values = {}
    loss_fn = oracle.ordered(token_loss, answer)
    for call in range(TOKEN_CALLS):
        module.zero_grad()
        batches = [
            (x.to(context.device), y.to(context.device)) for x, y in _token_batches(inputs, call)
        ]
        loss = accumulate_tokens(ddp, batches, loss_fn)
        _record(answer, call, module, loss)
    x, y = (tensor.to(context.device).repeat(20, 1) for tensor in _token_batches(inputs, 0)[0])
    answer["peak"] = peak_of(
        lambda: accumulate_tokens(ddp, [(x, y)] * MEMORY_K, token_loss),
        lambda: token_loss(module(x), y).backward(),
    )
    return answer


def _token_parts(case: Case, call: int) -> tuple[list[Gradient], np.ndarray, np.ndarray]:
    """Per micro-batch of all ranks: the gradient of its mean loss, the loss, the token count."""
    gradients, losses, counts = [], [], []
    for inputs in case.inputs:
        for tokens, targets in _token_batches(inputs, call):
            model = TokenModel(inputs, torch.float64)
            loss = token_loss(model(tokens), targets)
            loss.backward()
            gradients.append([oracle.grad_of(p) for p in model.parameters()])
            losses.append(loss.item())
            counts.append(int((targets != IGNORED).sum()))
    return gradients, np.array(losses), np.array(counts)


def judge_token_gradients(case: Case) -> list[Finding]:
    """Micro-batches of all ranks enter in proportion to their numbers of tokens.

    Counts may travel in any way, before the first backward or with the gradients.
    """
    misused = (oracle.find_misused_loss(answer, rank) for rank, answer in enumerate(case.answers))
    findings = [finding for finding in misused if finding]
    ranks = case.world_size
    for call, k in enumerate(case.inputs[0]["ks"]):
        basis, _, counts = _token_parts(case, call)
        expected = counts / counts.sum()
        own = counts.reshape(ranks, k)
        per_rank = (own / own.sum(axis=1, keepdims=True) / ranks).ravel()

        def why(
            weights: np.ndarray, rank: int, k: int, expected=expected, per_rank=per_rank
        ) -> str:
            if are_close(weights, np.full(ranks * k, 1 / (ranks * k))):
                if k == 1:
                    return "That is a mean of the ranks' means: divide by the tokens of all ranks."
                return "That is a mean of means: a token of a sparse micro-batch counts more."
            if ranks > 1 and are_close(weights, per_rank):
                return "That divides by the number of tokens of one rank; sum it over all ranks."
            if ranks > 1 and are_close(weights, expected / ranks):
                return "DDP divides by the number of ranks once more: multiply by it."
            if ranks > 1 and are_close(weights, expected * ranks):
                return "That is too large by the number of ranks."
            return ""

        what = f"micro-batches with {_expected(counts.tolist(), k)} tokens"
        findings += [*_judge_weights(case, findings, call, k, basis, expected.tolist(), what, why)]
    wrong = {finding.rank for finding in findings}
    peaks = (
        too_much_memory(answer.get("peak"), rank)
        for rank, answer in enumerate(case.answers)
        if rank not in wrong
    )
    return findings + [peak for peak in peaks if peak]


def judge_token_loss(case: Case) -> list[Finding]:
    """The returned loss is the mean over all tokens of all ranks.

    The mean with the weights of the gradient, which `judge_token_gradients` judges, is right, too.
    It may be a float or a tensor of one number.
    """
    findings: list[Finding] = []
    for call, k in enumerate(case.inputs[0]["ks"]):
        basis, losses, counts = _token_parts(case, call)
        expected = float((losses * counts).sum() / counts.sum())
        own_counts = np.repeat(counts.reshape(-1, k).sum(axis=1), k)
        for rank, answer in enumerate(case.answers):
            if any(finding.rank == rank for finding in findings):
                continue
            got, hint, own = answer.get(f"loss/{call}"), "", slice(rank * k, rank * k + k)
            weights = weights_of(basis, collect(answer, f"g{call}", len(basis[0])))
            if weights is not None and len(present(weights)) == len(weights):
                weighted = float(losses @ weights / weights.sum())
                if oracle.agrees(got, np.asarray(weighted)):
                    continue
            if isinstance(got, np.ndarray) and got.shape == ():
                local = float((losses[own] * counts[own]).sum() / counts[own].sum())
                if np.isclose(got, losses.mean(), rtol=1e-4):
                    hint = "That is the mean of the micro-batches' means."
                elif case.world_size > 1 and np.isclose(got, local, rtol=1e-4):
                    hint = "That is the mean over this rank's own tokens."
                elif np.isclose(got, (losses * counts / own_counts / case.world_size).sum(), 1e-4):
                    hint = "That is the mean of the ranks' means; ranks differ in their tokens."
            if wrong := oracle.differs(
                rank, "the returned loss", got, np.asarray(expected), hint=hint
            ):
                findings.append(wrong)
    return findings
