"""Criteria for clipping by the norm of a gradient whose shares lie on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of, same_array
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# Kind of the shares, and max_norm relative to their norm: below 1 the shares have to be scaled.
# JITTER keeps factors from being round numbers. The norm of "exact" is the limit itself, and every
# way of adding up gives it exactly.
JITTER = (0.93, 1.07)
KINDS = (
    ("all", 0.0),
    ("all", 0.3),
    ("all", 1.5),
    ("not on rank 0", 0.5),
    ("one rank", 0.7),
    ("zeros", 1.0),
    ("large", 1e-3),
    ("equal", 0.9),
    ("bfloat16", 0.6),
    ("exact", 1.0),
)
TRIPLES = ((3, 4, 12, 13), (6, 8, 24, 26), (8, 6, 24, 26), (9, 12, 20, 25))
FLOATS = ("float32", "float64")
# Relative, for a norm. Squares of bfloat16 shares may be rounded before they are added up.
PRECISE = {"float32": 1e-4, "bfloat16": 2e-2}
MOST_NUMBERS = 4
NEAR = 1e-3  # relative; recognises a norm or its square, but does not check its precision


def draw(source: Draw) -> list[Values]:
    """Private shares of several sizes, also empty shares and ranks without shares."""
    return _draw(source, KINDS)


def draw_cost(source: Draw) -> list[Values]:
    """Like `draw`, without shares that are all zeros, which only `judge` checks."""
    return _draw(source, tuple(kind for kind in KINDS if kind[0] != "zeros"))


def _draw(source: Draw, kinds: tuple[tuple[str, float], ...]) -> list[Values]:
    order = [int(i) for i in source.shared().permutation(len(kinds))]
    triple = TRIPLES[int(source.shared("triple").integers(len(TRIPLES)))]
    same = [np.asarray(source.shared("same").normal(size=n), dtype=np.float32) for n in (4, 5)]
    per_rank: list[Values] = []
    for rank in range(source.world_size):
        rng, values = source.private(rank), {}
        for number, kind in enumerate(kinds[i][0] for i in order):
            last = rank == source.world_size - 1
            counts = [int(rng.integers(3, 9)), 0, int(rng.integers(1, 6))]
            arrays = [rng.normal(size=count).astype(np.float32) for count in counts]
            if (kind == "not on rank 0" and rank == 0 and not last) or (
                kind == "one rank" and not last
            ):
                arrays = []
            if kind == "zeros":
                arrays = [array * 0 for array in arrays]
            if kind == "large":
                arrays = [array * np.float32(1e4) for array in arrays]
            if kind == "equal":
                arrays = same
            if kind == "bfloat16":
                arrays = [torch.from_numpy(array).bfloat16().float().numpy() for array in arrays]
            if kind == "exact":
                shares = (triple[:2], (), triple[2:3])
                arrays = [np.array(share, dtype=np.float32) * last for share in shares]
            for i, array in enumerate(arrays):
                values[f"g{number}/{i}"] = array
            values[f"count{number}"] = len(arrays)
        per_rank.append(values)
    limits = []
    for number, i in enumerate(order):
        norm = math.sqrt(sum(_square(values, number) for values in per_rank))
        kind, factor = kinds[i]
        if kind == "exact":
            limits.append(float(triple[3]))
            continue
        factor *= float(source.shared("jitter").uniform(*JITTER))
        limits.append(norm * factor if norm else 1.0)
    dtypes = ["bfloat16" if kinds[i][0] == "bfloat16" else "float32" for i in order]
    return [values | {"limits": limits, "dtypes": dtypes} for values in per_rank]


def _square(values: Values, number: int) -> float:
    arrays = [values[f"g{number}/{i}"] for i in range(values[f"count{number}"])]
    return float(sum(np.square(array.astype(np.float64)).sum() for array in arrays))


def observe(clip_by_global_norm: Any, inputs: Values, context: Context) -> Values:
    """The returned norms, and the shares after clipping."""
    answer: Values = {"norms": []}
    for number, limit in enumerate(inputs["limits"]):
        dtype = getattr(torch, inputs["dtypes"][number])
        shares = [
            torch.from_numpy(inputs[f"g{number}/{i}"].copy()).to(context.device, dtype)
            for i in range(inputs[f"count{number}"])
        ]
        norm = clip_by_global_norm(list(shares), limit)
        if not isinstance(norm, float):
            kind = type(norm).__name__
            raise TypeError(f"clip_by_global_norm: expected a float, got {kind}")
        answer["norms"].append(norm)
        for i, share in enumerate(shares):
            answer[f"g{number}/{i}"] = share.float().cpu().numpy()
    return answer


def judge(case: Case) -> list[Finding]:
    """Requires the norm of all shares; shares are scaled only if the norm exceeds the limit."""
    findings: list[Finding] = []
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, limit in enumerate(inputs["limits"]):
            dtype = inputs["dtypes"][number]
            if problem := _problem(case, rank, number, limit, answer):
                findings.append(Finding(f"{dtype}, max_norm {limit:.4g}: {problem}", rank))
                break
            norm = _norm(case, number)
            for i in range(inputs[f"count{number}"]):
                before = inputs[f"g{number}/{i}"]
                got = answer.get(f"g{number}/{i}")
                if norm > limit:
                    hint = f"All shares are scaled by max_norm / norm = {limit / norm:.4g}."
                    if wrong := oracle.differs(
                        rank, "a share", got, before * (limit / norm), dtype=dtype, hint=hint
                    ):
                        findings.append(wrong)
                elif not same_array(got, before):
                    findings.append(
                        Finding(
                            f"the norm {norm:.4g} is not above max_norm {limit:.4g}, and a share "
                            "was changed.",
                            rank,
                        )
                    )
            if findings and findings[-1].rank == rank:
                break
    return findings


def _norm(case: Case, number: int) -> float:
    return math.sqrt(sum(_square(values, number) for values in case.inputs))


def _problem(case: Case, rank: int, number: int, limit: float, answer: Values) -> str | None:
    """What is wrong with the returned norm, or None."""
    norms = answer.get("norms")
    got = item_of(norms, number)
    if not isinstance(got, float) or not math.isfinite(got):
        return f"expected a finite norm, got {str(got)[:40]}."
    norm, near = _norm(case, number), PRECISE[case.inputs[rank]["dtypes"][number]]
    if abs(got - norm) <= near * norm:
        return None
    own = math.sqrt(_square(case.inputs[rank], number))
    total = sum(math.sqrt(_square(values, number)) for values in case.inputs)
    why = "Squares are added up over all shares and all ranks; then comes the root."
    if abs(got - own) <= near * own:
        why = "That is the norm of this rank's own shares."
    elif abs(got - total) <= near * total:
        why = "That is the sum of the ranks' norms: add up squares, and take the root at the end."
    elif abs(got - norm / math.sqrt(case.world_size)) <= near * norm:
        why = "That is too little by the root of the number of ranks: was something averaged?"
    elif abs(got - min(norm, limit)) <= near * norm:
        why = "That is the norm after clipping."
    elif abs(got - norm) <= 0.01 * norm:
        why = "Nearly right: are squares added up, and sent, in less than float32?"
    return f"expected the norm {norm:.6g}, got {got:.6g}. {why}"


def judge_cost(case: Case) -> Iterator[Finding]:
    """Requires one collective per call over all ranks, of at most 4 numbers, in full precision.

    It may be an all-reduce or an all-gather, in float32 or float64.
    """
    calls = len(case.inputs[0]["limits"])
    whole = {c.key: reaches_all(c, case.world_size) for c in case.trace.collectives}
    payloads = {c.key: c.payloads for c in case.trace.collectives}
    for rank, events in enumerate(case.trace.events):
        if not isinstance(case.answers[rank].get("norms"), list):
            yield Finding("no norms were returned.", rank)
            continue
        mine = [e for e in events if e.kind == "issue" and e.collective != "barrier"]
        bad = [e for e in mine if e.numel > MOST_NUMBERS or e.dtype not in FLOATS]
        if bad:
            yield Finding(
                f"{bad[0].collective} of {bad[0].dtype}, numbers: {bad[0].numel}. One number says "
                "it all, the sum of squares, in float32 or float64, whatever the shares are.",
                rank,
            )
        elif case.world_size > 1 and (
            len(mine) != calls or not all(whole.get(e.key) for e in mine)
        ):
            yield Finding(
                f"{len(mine)} collectives for {calls} calls, expected one each, over all "
                f"{case.world_size} ranks.",
                rank,
            )
        elif case.world_size > 1:
            for number, event in enumerate(mine):
                if not _says_norm(case, rank, number, payloads[event.key].get(rank)):
                    yield Finding(
                        f"call {number}: what travelled has nothing to do with this rank's "
                        "shares, and the norm that was returned is not that of all shares. The "
                        "number that travels is the sum of squares.",
                        rank,
                    )
                    break


def _says_norm(case: Case, rank: int, number: int, sent: Any) -> bool:
    """Whether the rank returned the right norm, or at least sent the norm of its own shares.

    The square of that norm counts too. `judge` checks what the ranks make of these numbers.
    A right norm is enough, because no rank knows it without the other ranks' shares.
    """
    norms = case.answers[rank]["norms"]
    got, norm = norms[number] if number < len(norms) else None, _norm(case, number)
    if not isinstance(got, float) or not math.isfinite(got):
        return False
    near = max(NEAR, PRECISE[case.inputs[rank]["dtypes"][number]])
    if abs(got - norm) <= near * norm:
        return True
    square = _square(case.inputs[rank], number)
    total = float(np.sum(np.asarray(sent, dtype=np.float64))) if sent is not None else math.nan
    return any(abs(total - own) <= near * own for own in (square, math.sqrt(square)))
