"""Criteria for DDP written from scratch: values, on a real process group.

Every rank computes gradients on data of its own, so the right mean on every rank proves that the
gradients were exchanged. All criteria but the first two start from the same weights on every rank,
so that a mistake in broadcasting costs no points there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle, weights
from autograder.criteria.common.matched import matched_collectives
from autograder.criteria.common.places import alone, on_two_nodes
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

SIZES = (6, 9, 5, 3)
BATCH = 5
SMALL_CAP_MB = 0.0002  # about 200 bytes: several buckets, some with one parameter
BRANCH_CAP_MB = 0.00004  # about 40 bytes: one bucket per branch, all of the same size


def _tensors(inputs: Values, context: Context, *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(inputs[name]).to(context.device) for name in names]


def _step(ddp: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """One forward, backward and synchronisation."""
    oracle.mse(ddp(x), y).backward()
    ddp.finish_gradient_synchronization()


# --- what wrapping does --------------------------------------------------------------------------


class Normed(nn.Module):
    """A network with a frozen parameter and three buffers: float, integer, and not persistent.

    The memory of the frozen one is that of its transpose, as a convolution's in channels_last.
    """

    def __init__(self, inputs: Values) -> None:
        super().__init__()
        self.net = oracle.mlp(inputs)
        transpose = torch.from_numpy(inputs["frozen"].T.copy())
        self.frozen = nn.Parameter(transpose.t(), requires_grad=False)
        for name in ("running_mean", "num_batches", "mask"):
            value = torch.from_numpy(np.array(inputs[name]))
            self.register_buffer(name, value, persistent=name != "mask")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def draw_wrapping(draw: Draw) -> list[Values]:
    """Every rank starts from different parameters and buffers."""
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        inputs.append(
            oracle.draw_parameters(rng, SIZES)
            | oracle.draw_batch(rng, BATCH, SIZES)
            | {
                # These lose digits if they travel as float32.
                "frozen": rng.normal(size=(2, 3)),
                "running_mean": rng.normal(size=7).astype(np.float32),
                "num_batches": rng.integers(2**40, 2**41, size=()),
                "mask": rng.normal(size=(2, 3)).astype(np.float32),
            }
        )
    return inputs


@on_two_nodes
def observe_wrapping(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Parameters, buffers and one output after wrapping."""
    module = Normed(inputs).to(context.device)
    ddp = ddp_class(module)
    (x,) = _tensors(inputs, context, "x")
    answer: Values = {"output": ddp(x).detach().cpu().numpy()}
    for i, p in enumerate(module.net.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy()
    answer["frozen"] = module.frozen.detach().cpu().numpy()
    for name, buffer in module.named_buffers():
        answer[f"buffer {name}"] = buffer.detach().cpu().numpy()
    return answer


def judge_weights(case: Case) -> Iterator[Finding]:
    """Parameters equal rank 0's, and calling the wrapper runs the module with these parameters."""
    start = oracle.parameters_of(case.inputs[0])
    model = oracle.mlp(case.inputs[0], torch.float64)
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(start):
            hint = "Broadcast every parameter from rank 0 in __init__."
            what = f"parameter {i} after wrapping"
            if wrong := oracle.differs(rank, what, answer.get(f"p{i}"), expected, hint=hint):
                yield wrong
                break
        else:
            x = torch.from_numpy(case.inputs[rank]["x"]).double()
            output = model(x).detach().numpy()
            if wrong := oracle.differs(rank, "ddp(x)", answer.get("output"), output):
                yield wrong
            if _is_rounded(answer.get("frozen"), case.inputs[0]["frozen"]):
                yield Finding("a float64 parameter was rounded to float32 on its way.", rank)
            elif wrong := oracle.differs(
                rank,
                "a frozen parameter after wrapping",
                answer.get("frozen"),
                case.inputs[0]["frozen"],
                dtype="float64",
                hint="Frozen parameters are part of the model, too: broadcast them.",
            ):
                yield wrong


def judge_buffers(case: Case) -> Iterator[Finding]:
    """Buffers equal rank 0's.

    If parameters came as float32, which is `judge_weights`' matter, buffers may, too.
    """
    for rank, answer in enumerate(case.answers):
        in_floats = _is_rounded(answer.get("frozen"), case.inputs[0]["frozen"])
        for name in ("running_mean", "num_batches", "mask"):
            expected = np.asarray(case.inputs[0][name])
            if wrong := differs(
                rank,
                f"buffer {name} after wrapping",
                answer.get(f"buffer {name}"),
                expected.astype(np.float32) if in_floats else expected,
                rtol=0.0,
                atol=0.0,
                hint="Buffers (BatchNorm's statistics, say) are part of the model: broadcast them.",
            ):
                yield wrong


def _is_rounded(got: Any, expected: np.ndarray) -> bool:
    return isinstance(got, np.ndarray) and np.array_equal(got, expected.astype(np.float32))


# --- gradients -----------------------------------------------------------------------------------

STEPS = 3
EVAL_STEP = 2 * STEPS - 1  # the last one is in eval(): that changes no gradient


def draw_gradients(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank and step."""
    start = oracle.draw_parameters(draw.shared(), SIZES)
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), dict(start)
        for step in range(2 * STEPS):
            batch = oracle.draw_batch(rng, BATCH, SIZES)
            values |= {f"x/{step}": batch["x"], f"y/{step}": batch["y"]}
        inputs.append(values)
    return inputs


@on_two_nodes
def observe_gradients(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of several steps, with one bucket and with many, zeroed to None and to zeros."""
    answer: Values = {}
    for run, cap in enumerate((25.0, SMALL_CAP_MB)):
        module = oracle.mlp(inputs).to(context.device)
        ddp = ddp_class(module, bucket_cap_mb=cap)
        for step in range(run * STEPS, (run + 1) * STEPS):
            x, y = _tensors(inputs, context, f"x/{step}", f"y/{step}")
            getattr(ddp, "train", module.train)(step != EVAL_STEP)
            _step(ddp, x, y)
            for i, p in enumerate(module.parameters()):
                answer[f"g{step}/{i}"] = oracle.grad_of(p).copy()
            module.zero_grad(set_to_none=step % 2 == 0)
    return answer


def judge_gradients(case: Case) -> Iterator[Finding]:
    """Every gradient is the mean over ranks, in every step."""

    def local(rank: int, step: int) -> list[np.ndarray]:
        return oracle.gradients(
            case.inputs[rank], case.inputs[rank][f"x/{step}"], case.inputs[rank][f"y/{step}"]
        )

    return _judge_steps(
        case,
        2 * STEPS,
        local,
        lambda step: (
            f"step {step % STEPS}{', after eval()' if step == EVAL_STEP else ''}, "
            f"bucket_cap_mb={25.0 if step < STEPS else SMALL_CAP_MB}"
        ),
    )


def _judge_steps(
    case: Case,
    steps: int,
    local: Callable[[int, int], list[np.ndarray]],
    describe: Callable[[int], str],
    plain: Sequence[int] = (),
) -> Iterator[Finding]:
    """Findings for ranks whose gradients are not as they should be in one of the steps.

    Args:
        local: the gradients of a rank in a step.
        plain: numbers of parameters that show what else is wrong with this DDP (see `_shares`).
    """
    ranks = range(case.world_size)
    grads = [[local(rank, step) for rank in ranks] for step in range(steps)]
    shares = _shares(
        [[[g[r][i] for g in grads] for i in plain] for r in ranks],
        [[[case.answers[r].get(f"g{s}/{i}") for s in range(steps)] for i in plain] for r in ranks],
    )
    wrong_ranks: set[int] = set()
    for step in range(steps):
        for rank in set(ranks) - wrong_ranks:
            for i, own in enumerate(grads[step][rank]):
                expected = _combine(shares[rank], [g[i] for g in grads[step]])
                got = case.answers[rank].get(f"g{step}/{i}")
                hint = oracle.explain_gradient(got, expected, own, case.world_size)
                what = f"{describe(step)}: gradient of parameter {i}"
                if wrong := oracle.differs(rank, what, got, expected, hint=hint):
                    yield wrong
                    wrong_ranks.add(rank)
                    break


def _shares(
    own: Sequence[Sequence[Sequence[np.ndarray]]], got: Sequence[Sequence[Sequence[Any]]]
) -> np.ndarray:
    """What each rank's gradient counts for on each rank: 1/W, or what plain parameters show.

    A DDP that sums, say, loses `ddp_gradients`, and nothing where tied, frozen or unused parameters
    are judged: there they have to get what parameters get that are none of that.

    Args:
        own, got: per rank, plain parameter and step, a rank's own gradient and its answer.

    Returns:
        [W, W]. 1/W everywhere if most ranks did not get a part of every rank's gradient.
    """
    num_ranks = len(own)
    mean = np.full(num_ranks, 1 / num_ranks)
    columns = [[g for steps in rank for g in steps] for rank in own]
    rows = []
    for rank in got:
        row = weights.weights_of(columns, [g for steps in rank for g in steps]) if rank else None
        if row is None or np.allclose(row, mean, rtol=1e-3):
            row = mean
        rows.append(np.where(np.abs(row) < 1e-4 * np.abs(row).max(), 0.0, row))
    reduced = sum(len(weights.present(row)) == num_ranks for row in rows)
    return np.stack(rows if 2 * reduced > num_ranks else [mean] * num_ranks)


def _combine(shares: np.ndarray, gradients: Sequence[np.ndarray]) -> np.ndarray:
    return np.tensordot(shares, np.stack(gradients), axes=1)


# --- tied and frozen -----------------------------------------------------------------------------

TIED_SIZE, TIED_STEPS = 6, 4
AWKWARD = {
    "first.weight": "It is used twice: reduce it once, after both uses have added up.",
    "factor": "It is float64, the others are float32: a bucket has one dtype.",
    "gain": "It is a single number, of shape ().",
    "turned": "It is a transpose, so its memory is not contiguous.",
}


class Tied(nn.Module):
    """One matrix that is used twice, a frozen layer between, and a float64 factor at the end.

    There are a scalar, and a matrix whose memory is that of its transpose, as well.
    """

    def __init__(self, inputs: Values, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        first, self.frozen, last = (nn.Linear(TIED_SIZE, TIED_SIZE, dtype=dtype) for _ in range(3))
        self.first, self.last = first, last
        self.last.weight = self.first.weight
        self.factor = nn.Parameter(torch.ones(TIED_SIZE, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.turned = nn.Parameter(torch.ones(3, TIED_SIZE, dtype=dtype).t())
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(torch.from_numpy(inputs[name]))
        for p in self.frozen.parameters():
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        hidden = torch.tanh(hidden @ self.turned @ self.turned.t() * self.gain)
        return (hidden * self.factor).to(x.dtype)


def draw_tied(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank."""
    rng, shape = draw.shared(), (TIED_SIZE, TIED_SIZE)
    start = {
        name: rng.normal(0, 0.5, shape if name.endswith("weight") else TIED_SIZE).astype(np.float32)
        for name in ("first.weight", "first.bias", "frozen.weight", "frozen.bias", "last.bias")
    } | {"factor": rng.normal(1, 0.2, TIED_SIZE)}
    start["gain"] = np.array(rng.normal(1, 0.2), np.float32)
    start["turned"] = rng.normal(0, 0.5, (TIED_SIZE, 3)).astype(np.float32)
    sizes = (TIED_SIZE, TIED_SIZE)
    return [
        start | oracle.draw_batch(draw.private(r), BATCH, sizes) for r in range(draw.world_size)
    ]


@on_two_nodes
def observe_tied(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of two steps on the same batch, with many buckets, and with one of each dtype.

    Last, the gradients of a step in which each rank trains alone.
    """
    answer: Values = {}
    for run, cap in enumerate((SMALL_CAP_MB, 25.0)):
        module = Tied(inputs).to(context.device)
        ddp = ddp_class(module, bucket_cap_mb=cap)
        for step in (2 * run, 2 * run + 1):
            answer |= _tied_step(ddp, module, inputs, context, f"g{step}")
        for name, p in module.frozen.named_parameters():
            answer[f"value frozen.{name}"] = p.detach().cpu().numpy()
            answer[f"frozen {name} has a gradient"] = p.grad is not None
    with alone(context):
        module = Tied(inputs).to(context.device)
        return answer | _tied_step(ddp_class(module), module, inputs, context, "alone")


def _tied_step(
    ddp: Any, module: nn.Module, inputs: Values, context: Context, label: str
) -> dict[str, np.ndarray]:
    module.zero_grad()
    _step(ddp, *_tensors(inputs, context, "x", "y"))
    return {f"{label}/{name}": oracle.grad_of(p).copy() for name, p in module.named_parameters()}


def judge_tied(case: Case) -> Iterator[Finding]:
    """A tied parameter gets the mean of its whole gradient; frozen parameters do not change."""
    local = []
    for inputs in case.inputs:
        model = Tied(inputs, torch.float64)
        x, y = (torch.from_numpy(inputs[k]).double() for k in "xy")
        oracle.mse(model(x), y).backward()
        local.append({name: oracle.grad_of(p) for name, p in model.named_parameters()})
    plain, ranks = ("first.bias", "last.bias"), range(case.world_size)
    shares = _shares(
        [[[local[r][name]] * TIED_STEPS for name in plain] for r in ranks],
        [
            [[case.answers[r].get(f"g{s}/{name}") for s in range(TIED_STEPS)] for name in plain]
            for r in ranks
        ],
    )
    for rank, answer in enumerate(case.answers):
        (alone_share,) = _shares(
            [[[local[rank][name]] for name in plain]],
            [[[answer.get(f"alone/{name}")] for name in plain]],
        )
        for name in local[0]:
            expected = _combine(shares[rank], [grads[name] for grads in local])
            for step in range(TIED_STEPS):
                got = answer.get(f"g{step}/{name}")
                hint = oracle.explain_gradient(got, expected, local[rank][name], case.world_size)
                hint = hint or AWKWARD.get(name, "")
                if wrong := oracle.differs(rank, f"gradient of {name}", got, expected, hint=hint):
                    yield wrong
                    break
            else:
                what = f"in a process group of one rank: gradient of {name}"
                expected = _combine(alone_share, [local[rank][name]])
                if wrong := oracle.differs(rank, what, answer.get(f"alone/{name}"), expected):
                    yield wrong
        # The tolerance above is that of float32, because the loss is float32. But the all-reduce
        # has to use float64, so the gradient must have more digits than float32 holds.
        factors = [answer.get(f"g{step}/factor") for step in range(TIED_STEPS)]
        if any(
            isinstance(factor, np.ndarray)
            and factor.dtype.kind == "f"
            and np.array_equal(factor, factor.astype(np.float32))
            for factor in factors
        ):
            yield Finding(
                "gradient of factor: it is float64, but was rounded to float32. A bucket has the "
                "dtype of its parameters.",
                rank,
            )
        for name in ("frozen.weight", "frozen.bias"):
            if wrong := oracle.differs(
                rank, name, answer.get(f"value {name}"), case.inputs[0][name]
            ):
                yield wrong
            elif answer.get(f"{name.replace('.', ' ')} has a gradient") is True:
                yield Finding(
                    f"{name} is frozen, but has a gradient after the step: it should stay None, or "
                    "an optimizer with weight decay changes the parameter.",
                    rank,
                )


# --- unused --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three branches; the caller chooses which of them to use."""

    def __init__(self, inputs: Values, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=dtype)
        self.branches = nn.ModuleList([nn.Linear(4, 2, dtype=dtype) for _ in range(3)])
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.from_numpy(inputs[f"p{i}"]))

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([self.branches[i](hidden) for i in use]).sum(0)


def draw_unused(draw: Draw) -> list[Values]:
    """Which branches each rank uses in each step; no rank, some or all ranks use branch 2."""
    rng, world_size = draw.shared(), draw.world_size
    start: Values = {}
    for i in range(4):
        start[f"p{2 * i}"] = rng.normal(0, 0.5, (4 if i == 0 else 2, 4)).astype(np.float32)
        start[f"p{2 * i + 1}"] = rng.normal(0, 0.5, 4 if i == 0 else 2).astype(np.float32)
    lucky = int(rng.integers(world_size))
    inputs = []
    for rank in range(world_size):
        only = [0, 2] if rank == lucky else [1]
        uses = [[0, 1], only, [0, 1, 2], [rank % 3]]
        batch = oracle.draw_batch(draw.private(rank), BATCH, (4, 2))
        inputs.append(start | batch | {"uses": uses})
    return inputs


@on_two_nodes
def observe_unused(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of steps that use different branches each time; None is recorded as zeros."""
    module = Branches(inputs).to(context.device)
    x, y = _tensors(inputs, context, "x", "y")
    answer: Values = {}
    with matched_collectives(ddp_class.__init__, context):
        ddp = ddp_class(module, bucket_cap_mb=BRANCH_CAP_MB)
        for step, use in enumerate(inputs["uses"]):
            module.zero_grad(set_to_none=step != 3)  # zeros, not None, before step 3
            oracle.mse(ddp(x, use=use), y).backward()
            ddp.finish_gradient_synchronization()
            for i, p in enumerate(module.parameters()):
                answer[f"g{step}/{i}"] = oracle.grad_of(p).copy()
    return answer


def judge_unused(case: Case) -> Iterator[Finding]:
    """Ranks that did not use a parameter count as zeros in its mean.

    Here buckets become ready in a different order on each rank. A rank that launches them in that
    order reduces the wrong buckets together, because all branches have the same shape.
    """

    def local(rank: int, step: int) -> list[np.ndarray]:
        inputs = case.inputs[rank]
        model = Branches(inputs, torch.float64)
        x, y = (torch.from_numpy(inputs[k]).double() for k in "xy")
        oracle.mse(model(x, inputs["uses"][step]), y).backward()
        return [oracle.grad_of(p) for p in model.parameters()]

    return _judge_steps(
        case,
        4,
        local,
        lambda step: f"step {step} (branches per rank: {[i['uses'][step] for i in case.inputs]})",
        plain=(0, 1),  # the trunk, which all ranks use in every step
    )
