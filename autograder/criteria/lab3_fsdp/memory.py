"""Criteria for bytes per rank: by formula, and measured in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.answers import as_number, item_of, returned, unit_hint
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp import parts

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
_PARTS = ("parameters", "gradients", "optimizer state")


def state_bytes(num_params: int, num_ranks: int, strategy: str, mixed: bool) -> list[int]:
    """Bytes of parameters, gradients and optimizer state on a rank."""
    stage = STRATEGIES.index(strategy)
    shard = -(-num_params // num_ranks)
    sharded_from = (3, 2, 1)
    per_param = (2, 2, 12) if mixed else (4, 4, 8)
    return [
        (shard if stage >= first else num_params) * each
        for first, each in zip(sharded_from, per_param, strict=True)
    ]


def plain(value: Any) -> Any:
    """A number or text that JSON can hold; anything else, and very large integers, as text."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, int) and abs(value) >= 1 << 62:
        return repr(value)[:40]
    return value if isinstance(value, int | float | str) else repr(value)[:80]


def _triple(value: Any) -> Any:
    return [plain(v) for v in value] if isinstance(value, tuple | list) else plain(value)


# --- formula -------------------------------------------------------------------------------------


def draw_formula(draw: Draw) -> list[Values]:
    """Small sizes that divide, large sizes that do not, for every strategy; and one huge size."""
    rng = draw.shared()
    rows = []
    for strategy in STRATEGIES:
        for mixed in (False, True):
            ranks = int(rng.integers(3, 40))
            rest = int(rng.integers(1, ranks))
            rows.append([int(rng.integers(10, 1000)) * ranks, ranks, strategy, mixed])
            rows.append([int(rng.integers(10**6, 10**9)) * ranks + rest, ranks, strategy, mixed])
    # No float can hold the quotient P / N: the nearest float is below it.
    huge = 2**55 + 8 * int(rng.integers(1, 1000)) + int(rng.integers(1, 4))
    rows.append([huge, 8, "zero3", False])
    return [{"rows": rows} for _ in range(draw.world_size)]


def observe_formula(bytes_per_rank: Any, inputs: Values, context: Context) -> Values:
    """The three numbers for each row, and the result for an unknown strategy."""
    told = [
        _triple(returned(bytes_per_rank(n, ranks, strategy, mixed=mixed), "bytes_per_rank"))
        for n, ranks, strategy, mixed in inputs["rows"]
    ]
    return {"told": told, "unknown": [_of_unknown(bytes_per_rank, *row) for row in UNKNOWN]}


# (number of ranks, name of no strategy); most of the names are close to that of a strategy.
UNKNOWN = ((4, "zero4"), (1, "zero4"), (4, "zero0"), (4, "DDP"), (4, "zero"), (4, "fsdp"))


def _of_unknown(bytes_per_rank: Any, ranks: int, strategy: str) -> Any:
    try:
        return _triple(bytes_per_rank(100, ranks, strategy))
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__


def judge_formula(case: Case) -> Iterator[Finding]:
    """P entries, or ceil(P / N) if sharded, times the bytes per entry."""
    for rank, answer in enumerate(case.answers):
        told = answer.get("told")
        for number, (n, ranks, strategy, mixed) in enumerate(case.inputs[rank]["rows"]):
            got = item_of(told, number)
            expected = state_bytes(n, ranks, strategy, mixed)
            if isinstance(got, list) and got == expected and all(type(v) is int for v in got):
                continue
            call = f"bytes_per_rank({n}, {ranks}, {strategy!r}, mixed={mixed})"
            yield Finding(
                f"{call}: expected {tuple(expected)}, got {_as_tuple(got)}."
                f"{_explain_formula(got, expected)}",
                rank,
            )
            break
        else:
            for number, (ranks, strategy) in enumerate(UNKNOWN):
                got = item_of(answer.get("unknown"), number)
                if str(got) != "ValueError":
                    yield Finding(
                        f"bytes_per_rank(100, {ranks}, {strategy!r}): expected a ValueError, got "
                        f"{_as_tuple(got)}.",
                        rank,
                    )
                    break


def _as_tuple(got: Any) -> Any:
    return tuple(got) if isinstance(got, list) else got


def _unit(got: list[Any], expected: list[int]) -> str:
    """`unit_hint` for three numbers."""
    numbers = [as_number(value) for value in got]
    hint = "" if None in numbers else unit_hint(np.array(numbers), np.array(expected))
    return hint and f" {hint}"


def _explain_formula(got: Any, expected: list[int]) -> str:
    if not isinstance(got, list) or len(got) != 3:
        return ""
    if hint := _unit(got, expected):
        return hint
    wrong = [i for i in range(3) if got[i] != expected[i]]
    if not wrong or not all(isinstance(v, int | float) for v in got):
        return ""
    i = wrong[0]
    if abs(got[i] - expected[i]) <= max(1e-9 * expected[i], 12):
        return f" {_PARTS[i]}: rounded up, in whole numbers?"
    return f" Look at the {_PARTS[i]}."


# --- measured ------------------------------------------------------------------------------------


def draw_measured(draw: Draw) -> list[Values]:
    """Widths that the number of ranks divides (one case adds a row to them)."""
    rng = draw.shared()
    widths = [int(v) * 840 // 105 for v in rng.integers(2, 7, size=2)]
    n = draw.world_size
    widths = [w * n // np.gcd(w, n) for w in widths]
    widths[1] += 8 * n * (widths[0] == widths[1])  # else every model has two layers of one shape
    return [{"widths": [int(w) for w in widths]} for _ in range(n)]


def _measured_cases(widths: list[int], mesh: Any, device: torch.device) -> Any:
    """(name, parameters, optimizer) of each case, after a training step in all cases but one."""
    from torch.distributed.fsdp import fully_shard

    a, b = widths
    for name in _MEASURED:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if name == "half" else torch.float32
        inner = a if name == "twins" else b + (name == "uneven")
        model = nn.Sequential(nn.Linear(a, inner), nn.Linear(inner, a)).to(device, dtype)
        if name == "frozen":
            model[0].requires_grad_(False)
        if name in ("sharded", "uneven"):
            for module in [*model, model]:
                fully_shard(module, mesh=mesh)
        params = list(model.parameters())
        trained = [p for p in params if p.requires_grad]
        if name == "partly":
            trained = list(model[1].parameters())
        if name == "views":
            _join(params)
        if name == "momentum":
            optimizer: Any = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        else:
            groups = [{"params": list(module.parameters())} for module in model]
            optimizer = torch.optim.AdamW(groups if name == "groups" else trained, lr=1e-3)
        if name != "before":
            model(torch.ones(2, a, device=device, dtype=dtype)).square().mean().backward()
            optimizer.step()
        if name == "late":
            model[0].requires_grad_(False)
        if name == "momentum":  # its state may hold more than tensors, and tensors of integers
            optimizer.state[params[0]] |= {"count": 1, "last": None, "seen": torch.tensor([7])}
        # One parameter is given twice, as with tied weights.
        yield name, [*params, params[0]] if name == "whole" else params, optimizer


def _join(params: list[nn.Parameter]) -> None:
    """Makes the parameters views of one flat tensor."""
    flat = torch.cat([p.detach().flatten() for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data = part.view_as(p)


def observe_measured(local_bytes: Any, inputs: Values, context: Context) -> Values:
    """What the function returns for each case."""
    mesh = parts.make_mesh(context.device.type)
    told: Values = {}
    spoilt = []
    for name, params, optimizer in _measured_cases(inputs["widths"], mesh, context.device):
        told[name] = _triple(returned(local_bytes(iter(params), optimizer), "local_bytes"))
        spoilt += [name] * (not _can_be_saved(optimizer))
    return {"told": told, "spoilt": spoilt}


def _can_be_saved(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.state_dict()
    except KeyError:  # it has state of a parameter that it does not hold
        return False
    return True


def _expected_bytes(widths: list[int], name: str, world_size: int, rank: int) -> list[int]:
    a, b = widths
    adamw = name not in ("before", "momentum")
    counters = 4 * (2 if name in ("frozen", "partly") else 4) if adamw else 0  # a float32 each
    if name == "uneven":  # cut by rows, as torch.chunk does: the last ranks have fewer rows or none
        rows = -(-(b + 1) // world_size)
        mine = max(0, min(rows, b + 1 - rank * rows))
        local = 4 * (mine * (a + 1) + a // world_size * (b + 2))
        return [local, local, 2 * local + counters]
    first, second = 4 * (a * b + b), 4 * (a * b + a)
    total, twin = first + second, 4 * (a * a + a)
    table = {
        "before": [total, 0, 0],
        "whole": [total, total, 2 * total],
        "sharded": [total // world_size, total // world_size, 2 * total // world_size],
        "momentum": [total, total, total + 8],
        "half": [total // 2, total // 2, total],
        "frozen": [total, second, 2 * second],
        "partly": [total, total, 2 * second],
        "late": [total, total, 2 * total],
        "groups": [total, total, 2 * total],
        "views": [total, total, 2 * total],
        "twins": [2 * twin, 2 * twin, 4 * twin],
    }
    parameters, gradients, state = table[name]
    return [parameters, gradients, state + counters]


_MEASURED = {
    "before": "a whole model before its first step",
    "whole": "a whole model with AdamW, one parameter given twice",
    "sharded": "a model behind fully_shard",
    "uneven": "a model behind fully_shard, with rows that the ranks do not divide",
    "half": "a model in bf16",
    "momentum": "SGD with momentum, whose state also holds an int, a None and an int64 tensor",
    "partly": "a model of which the optimizer holds one layer; all have gradients",
    "frozen": "a model with a frozen layer (its gradients are None)",
    "late": "a model with a layer that was frozen after its step (its gradients are still there)",
    "groups": "a model whose optimizer has two groups",
    "views": "a model whose parameters are views of one flat tensor",
    "twins": "a model with two layers of one shape",
}


def judge_measured(case: Case) -> Iterator[Finding]:
    """Bytes of local parts; Adam's step counters are tensors of four bytes each."""
    for rank, answer in enumerate(case.answers):
        told = answer.get("told")
        for name, what in _MEASURED.items():
            got = told.get(name) if isinstance(told, dict) else None
            expected = _expected_bytes(case.inputs[rank]["widths"], name, case.world_size, rank)
            right = isinstance(got, list) and all(type(v) is int for v in got) and got == expected
            if not right:
                yield Finding(
                    f"{what}: expected {tuple(expected)}, got {_as_tuple(got)}."
                    f"{_explain_measured(name, got, expected, case.world_size)}",
                    rank,
                )
                break
        else:
            if (spoilt := item_of(answer.get("spoilt"), 0)) is not None:
                yield Finding(
                    f"{_MEASURED.get(str(spoilt), 'a model')}: after it was measured, "
                    "optimizer.state_dict() fails. optimizer.state is a defaultdict: state[p] "
                    "makes an entry, also for a parameter that the optimizer does not hold.",
                    rank,
                )


def _explain_measured(name: str, got: Any, expected: list[int], world_size: int) -> str:
    if not isinstance(got, list) or len(got) != 3:
        return ""
    if hint := _unit(got, expected):
        return hint
    if got[:2] == expected[:2] and isinstance(got[2], int) and 0 < expected[2] - got[2] <= 16:
        if name == "momentum":
            return " The int64 tensor in the state is missing: each counts, whatever its dtype."
        return " AdamW's step counters are tensors as well."
    if world_size == 1 or name not in ("sharded", "uneven"):
        return ""
    for value, right in zip(got, expected, strict=True):
        if right and isinstance(value, int) and abs(value - right * world_size) <= 64:
            return " That is the whole of it: numel() of a DTensor is not what lies on this rank."
    return ""
